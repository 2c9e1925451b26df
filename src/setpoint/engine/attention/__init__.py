"""Attention over the paged KV pool for any mix of rows: one protocol, a reference implementation
(``torch_ref``), and faster ones that are tested against it."""
