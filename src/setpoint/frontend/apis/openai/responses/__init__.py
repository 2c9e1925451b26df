"""OpenAI's Responses API (docs/responses.md): ``body`` and ``items`` read a request, ``events`` and
``reply`` make its answer, ``api`` puts them together without HTTP, ``routes`` adds HTTP."""
