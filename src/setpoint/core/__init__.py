"""Plain data and protocols that both planes share: token ids, page numbers and other numbers.
Imports no torch and does no I/O."""
