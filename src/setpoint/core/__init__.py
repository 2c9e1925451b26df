"""Plain data and protocols that both planes share. Works on ids, page numbers and numbers; imports
no torch, no I/O."""
