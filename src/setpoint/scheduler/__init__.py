"""The control plane's heart: which rows run next, on which pages. Works on ids and numbers; knows
no tensors, text or sockets."""
