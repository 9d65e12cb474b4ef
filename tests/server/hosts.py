"""Apps of the frameworks of docs/tutorial-fastapi.md, each with the one line that the page has for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sidecar import AdmissionMiddleware
from tests.support.markdown import table

PAGE = Path(__file__).parents[2] / "docs" / "tutorial-fastapi.md"
CHAT = "/v1/chat/completions"
BODY: Mapping[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


def line_of(host: str) -> str:
    """The line that the page has for a host."""
    (cell,) = (cell for name, cell in table(PAGE, "The line for each host") if host in name.split(", "))
    return cell.split("`")[1]


class Host(NamedTuple):
    """A framework's package, an app with `{line}` in its place, and a request that the app answers."""

    package: str
    source: str
    path: str = CHAT
    body: Mapping[str, Any] = BODY
    accept: str = "application/json"
    name: str = "app"

    def app(self, line: str) -> Any:
        """The app with the line in it. Skips where the framework is not installed."""
        pytest.importorskip(self.package, reason=f"pip install -e '.[hosts]' installs {self.package}")
        names: dict[str, Any] = {"__name__": __name__, "json": json, "AdmissionMiddleware": AdmissionMiddleware}
        exec(self.source.replace("{line}", line), names)
        return names[self.name]


FASTAPI = """
from fastapi import FastAPI
app = FastAPI()
{line}

@app.post("/v1/chat/completions")
async def chat(body: dict):
    return {"model": body["model"]}
"""
STARLETTE = """
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

async def chat(request):
    return JSONResponse({"model": (await request.json())["model"]})

app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
{line}
"""
LITESTAR = """
from litestar import Litestar, Request, post

@post("/v1/chat/completions", status_code=200)
async def chat(request: Request) -> dict:
    return {"model": (await request.json())["model"]}

app = Litestar([chat], logging_config=None)  # else it configures the logging of the process
{line}
"""
QUART = """
from quart import Quart, request
app = Quart(__name__)
{line}

@app.post("/v1/chat/completions")
async def chat():
    return {"model": (await request.get_json())["model"]}
"""
DJANGO = """
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import JsonResponse
from django.urls import path

async def chat(request):
    return JsonResponse({"model": json.loads(request.body)["model"]})

class Urls:
    urlpatterns = [path("v1/chat/completions", chat)]

settings.configured or settings.configure(ROOT_URLCONF=Urls, ALLOWED_HOSTS=["127.0.0.1"])  # once in a process
{line}
"""
BLACKSHEEP = """
from blacksheep import Application, FromJSON, Router, json as answer
router = Router()

@router.post("/v1/chat/completions")
async def chat(data: FromJSON[dict]):
    return answer({"model": data.value["model"]})

app = Application(router=router)
{line}
"""
FASTMCP = """
from fastmcp import FastMCP
from starlette.middleware import Middleware
mcp = FastMCP("m")
{line}
"""
INITIALIZE = {
    "protocolVersion": "2025-03-26",
    "capabilities": {},
    "clientInfo": {"name": "a test", "version": "1"},
}
HOSTS = {
    "FastAPI": Host("fastapi", FASTAPI),
    "Starlette": Host("starlette", STARLETTE),
    "Litestar": Host("litestar", LITESTAR),
    "Quart": Host("quart", QUART),
    "Django": Host("django", DJANGO, name="application"),
    "BlackSheep": Host("blacksheep", BLACKSHEEP),
    "FastMCP": Host(
        "fastmcp",
        FASTMCP,
        path="/mcp",
        body={"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE},
        accept="application/json, text/event-stream",
    ),
}
