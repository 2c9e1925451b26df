"""The link between the frontend and the engine process: sockets, messages, and the lives of an
engine as the frontend sees them."""
