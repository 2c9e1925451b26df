"""The pages that show ``/openapi.json`` to people. Their scripts come from jsDelivr; without a way
to it they are empty."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Setpoint - {name}</title>
{head}
</head>
<body>
{body}
</body>
</html>
"""
_SWAGGER = _PAGE.format(
    name="Swagger UI",
    head='<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">',
    body="""<div id="routes"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({
  url: "/openapi.json", dom_id: "#routes", deepLinking: true, showExtensions: true,
  showCommonExtensions: true
});
</script>""",
)
_REDOC = _PAGE.format(
    name="ReDoc",
    head="<style>body { margin: 0 }</style>",
    body="""<redoc spec-url="/openapi.json"></redoc>
<script src="https://cdn.jsdelivr.net/npm/redoc@2/bundles/redoc.standalone.js"></script>""",
)


async def swagger(request: Request) -> Response:
    return HTMLResponse(_SWAGGER)


async def redoc(request: Request) -> Response:
    return HTMLResponse(_REDOC)
