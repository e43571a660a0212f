"""`/openapi.json`: OpenAPI 3.1, generated from `ROUTES`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from dlrover_hooks.protocol import PROTOCOL, ROUTES, Problem, Route

_REF = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """The complete OpenAPI document, ready to be encoded as JSON."""
    types = [*(kind for route in ROUTES for kind in (route.request, route.reply)), Problem]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    refs = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, refs, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dlrover-hooks master", "version": str(PROTOCOL)},
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, refs: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    name = route.request.__name__
    operation: dict[str, Any] = {
        "operationId": name[0].lower() + name[1:],
        "summary": route.summary,
        "responses": {
            "200": {"description": "OK", "content": {"application/json": {"schema": refs[route.reply]}}},
            "default": {
                "description": "Refused; `type` names the error.",
                "content": {"application/problem+json": {"schema": refs[Problem]}},
            },
        },
    }
    if description := components[name].get("description"):
        operation["description"] = description
    parameters = _parameters(route, components[name]) if route.in_url else []
    if route.event:
        parameters.append(_KEY)
    if parameters:
        operation["parameters"] = parameters
    if not route.in_url:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[route.request]}}}
    return operation


_KEY: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "INCARNATION/CHANNEL/SEQ; sent again, the event is answered as before and not applied twice.",
    "schema": {"type": "string", "pattern": "^[^/]+/[^/]+/[0-9]{1,15}$"},
}


def _parameters(route: Route, schema: dict[str, Any]) -> list[dict[str, Any]]:
    in_path = set(re.findall(r"{(\w+)}", route.path))
    required = set(schema.get("required", ())) | in_path
    return [
        {"name": name, "in": "path" if name in in_path else "query", "required": name in required, "schema": field}
        for name, field in schema.get("properties", {}).items()
    ]
