"""An engine's OpenAPI document, as far as it tells whether a chat request has a field for the priority."""

from __future__ import annotations

from sidecar.engines.reading.pages import mapping


def has_priority(document: object) -> bool | None:
    """Whether `ChatCompletionRequest` has a `priority`; None where the document does not describe that request."""
    schemas = mapping(mapping(mapping(document).get("components")).get("schemas"))
    request = mapping(schemas.get("ChatCompletionRequest"))
    return "priority" in mapping(request.get("properties")) if request else None
