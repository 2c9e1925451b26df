"""The pointwise operations of a layer, per device: one protocol (``ops``), its definition
(``ref``), faster ones beside it."""
