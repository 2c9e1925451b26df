"""OpenAI's Responses API (docs/responses.md): ``body`` and ``items`` read a request,
``response_events`` and ``reply`` make its answer, ``api`` combines them without HTTP, and
``response_routes`` adds HTTP."""
