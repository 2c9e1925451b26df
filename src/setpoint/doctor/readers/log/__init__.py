"""Reads the logs of SGLang, of every generation, and of Setpoint: by key, never by position.

``stream`` opens a file and cuts it into blocks of whole lines; ``wrapping`` takes off what a
container runtime, a log shipper or a terminal put around a line; ``batch_lines`` understands one
line that reports a batch and makes a pattern of its shape; ``scan`` applies the patterns to whole
blocks; ``table`` turns the columns into moments; ``messages``, ``startup`` and ``server_args``
understand the other lines; ``life`` is one run of one server; ``reader`` puts them together.
"""
