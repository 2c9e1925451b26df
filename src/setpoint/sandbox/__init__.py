"""Child processes with limits that the kernel enforces, for work on what strangers wrote: chat
templates, grammars, regular expressions, files that a library maps."""
