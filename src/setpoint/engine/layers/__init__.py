"""The modules that models are made of. A layer gets the ForwardContext as an argument; there are no
module globals."""
