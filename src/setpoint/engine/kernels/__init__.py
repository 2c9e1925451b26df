"""The pointwise operations of a layer, per device: one protocol (``ops``), its definition
(``ref``), and faster ones that are tested against it."""
