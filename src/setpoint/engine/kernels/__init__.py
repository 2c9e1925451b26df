"""The pointwise operations of a layer, per device: one protocol (``ops``), a reference
implementation that defines the results (``ref``), and faster ones that are tested against it."""
