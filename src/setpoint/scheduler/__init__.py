"""Decides which rows run next and on which pages. Works on ids and numbers; knows no tensors, text
or sockets."""
