"""Write a starter policy that fits an engine: one file for the pool, one for each tenant, each tenant with a new key.

Reads what the engine says of itself, and sends it no request that generates. Without --upstream it asks no one, and
writes a policy for --engine and --requests, or else for `sidecar emulate`; with --mounted, for the middleware in an app
of your own. The policy begins with `mode: observe`:
every request passes. A key is printed once, or written to a file with --keys-to; the policy holds its hash. No file is
ever overwritten: all files are written, or none.

Exit codes: 0 the files were written; 1 they, or the JSON file, were not, and one line says why; 2 a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from sidecar.cli.arguments import (
    ADMIN,
    ADMIN_PORT,
    CLIENTS_PORT,
    KEY_VARIABLE,
    add_key,
    key_given,
    server_url,
    whole_number,
)
from sidecar.cli.init_files import DENY, pool_file, tenant_file, tier_by_tenant, tiers_for, with_promise
from sidecar.cli.output import STANDARD_OUTPUT, CommandFailed, say, write_json
from sidecar.engines.base import Facts, Gauges
from sidecar.engines.discovery import Identity
from sidecar.engines.registry import BUILT_IN, ENGINES
from sidecar.policy.capacity import DEFAULT_WAITING as WAITING
from sidecar.policy.compiler import load, load_files, shipped_policies
from sidecar.policy.fields import EngineName, ModelName, TenantName
from sidecar.policy.problems import PolicyError, printable
from sidecar.policy.secrets import ENGINE_KEY_VARIABLE
from sidecar.policy.tenant_keys import new_key
from sidecar.policy.warnings import warnings
from sidecar.templates import render
from sidecar.tools.doctor.recommendation import Queueing, Recommendation, recommend
from sidecar.tools.doctor.survey import CannotLook, Survey, survey
from sidecar.tools.text import table

# -- Starter policy for several engines: their names, their capacities, and a pool for each model that they serve.

_FLOW = re.compile(r"^capacity: ")


def disagreement(urls: Sequence[str], reads: Sequence[Survey]) -> str | None:
    """Why one policy cannot have these engines; None where it can."""
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice is not None:
        return f"--upstream {printable(twice, 200)} is given twice; give each engine once"
    first = reads[0].engine
    for url, read in zip(urls, reads, strict=True):
        if read.engine is not first:
            return (
                f"{printable(url, 200)} is {read.engine.name}, and {printable(urls[0], 200)} is {first.name}: the "
                "engines of one policy are of one kind; write a policy for each kind"
            )
    return None


def engine_names(urls: Sequence[str]) -> list[str]:
    """A name for each address: the first part of its host where that tells them apart, else its place."""
    names = [_host_name(url) for url in urls]
    if None in names or len(set(names)) < len(names):
        return [f"engine-{place}" for place in range(1, len(urls) + 1)]
    return [str(name) for name in names]


def _host_name(url: str) -> str | None:
    host = urlsplit(url).hostname or ""
    try:
        ip_address(host)
    except ValueError:
        name = host.partition(".")[0]
    else:
        return None
    try:
        return str(TypeAdapter(EngineName).validate_python(name))
    except ValidationError:
        return None


def engines_by_model(names: Sequence[str], reads: Sequence[Survey]) -> Mapping[str, list[str]]:
    """The engines of each model, where they serve several; empty where they serve one, or do not say which."""
    found: dict[str, list[str]] = {}
    for name, read in zip(names, reads, strict=True):
        try:
            model = TypeAdapter(ModelName).validate_python(read.identity.model)
        except ValidationError:
            return {}
        found.setdefault(model, []).append(name)
    return found if len(found) > 1 else {}


def recommended_engines(
    urls: Sequence[str], names: Sequence[str], capacities: Sequence[Recommendation], models: Mapping[str, list[str]]
) -> Recommendation:
    """The policy's `engines`, and its `models` where there are several. `capacities` has one for each engine."""
    sizes = [_FLOW.sub("", one.yaml) for one in capacities]
    common = max(sizes, key=sizes.count)
    lines = ["engines:", "  static:"]
    for name, url, size in zip(names, urls, sizes, strict=True):
        own = "" if size == common else f", capacity: {size}"
        lines.append(f'    - {{name: "{name}", url: "{url}"{own}}}')
    lines.append(f"  capacity: {common}    # of each engine that writes none of its own")
    if models:
        lines.append("models:    # a pool for each, chosen by a request's model; another model gets a 404")
        lines += [f'  "{model}": {{engines: [{", ".join(engines)}]}}' for model, engines in models.items()]
    reasons = list(dict.fromkeys(one.reason for one in capacities))
    of_each = reasons[0] if len(reasons) == 1 else "as each of them reports"
    return Recommendation("\n".join(lines), f"the sum of {len(urls)} engines; {of_each}")


EXAMPLE = """  sidecar init --upstream http://127.0.0.1:8000
  sidecar init policies/ --upstream http://127.0.0.1:8000 --requests 256 --tenants chat,tools=normal,nightly
  sidecar init --upstream http://a:8000 --upstream http://b:8000     several engines behind one pool
  sidecar init                       for `sidecar emulate --engine vllm`
  sidecar init policies/ --engine sglang --requests 256     no engine is running yet
  sidecar init --mounted --requests 8     the middleware in an app of your own, whose engine runs 8 requests at once
  sidecar init --example             the annotated example that is shipped, with keys that everyone knows"""

POOL_FILE, TENANTS = "policy.yaml", "tenants"
_ENGINE_URL = "http://127.0.0.1:8000"
EMULATED_REQUESTS = 8
"""What `sidecar emulate` runs at once unless it is asked otherwise."""
MOST_REQUESTS = 1_000_000
"""More than any engine runs at once: a larger number is a mistake, on the command line and on a page alike."""
_UNBOUNDED = (
    "how many requests it runs at once (vLLM: --max-num-seqs) is learned under load, or given with --requests N; "
    "`sidecar doctor` measures it"
)
_SAYS_NOTHING = "reports neither the tokens of its KV cache nor how many requests it runs at once"
_GIVE_REQUESTS = (
    "give the second with --requests N (vLLM: --max-num-seqs, SGLang: --max-running-requests, "
    "TensorRT-LLM: max_batch_size)"
)
_EXISTS = "{} exists, and no file is overwritten; move it away, or name another folder"
_PORTS_TRIED = 20
_KEYS = (ENGINE_KEY_VARIABLE, KEY_VARIABLE)


class CannotWrite(ValueError):
    """No policy can be written. The message is one line that says what to change."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command's own arguments."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group().add_argument
    upstream = "the engine, e.g. http://127.0.0.1:8000; repeat it for several engines"
    source("--upstream", type=server_url, action="append", metavar="URL", help=upstream)
    source("--mounted", action="store_true", help="for an app of your own that mounts the middleware; needs --requests")
    source("--example", action="store_true", help="copy the shipped example, and nothing else")
    add("folder", nargs="?", metavar="DIR", help="folder for the files; made if missing (default policies/)")
    add("--dir", metavar="DIR", help="the same folder, as an option")
    parser.set_defaults(refuse=parser.error)
    add(
        "--tenants",
        type=_tenants,
        default=_tenants("chat,nightly"),
        metavar="NAME[=TIER],...",
        help="the clients of the engine (default chat,nightly). Without =TIER the first is high, the last batch, the "
        "others normal",
    )
    anonymous = "the tier of requests without a key (default deny: 401 once the policy is enforced)"
    add("--anonymous", default=DENY, metavar="TIER", help=anonymous)
    add("--keys-to", metavar="DIR", help="write each key to DIR/TENANT.key, for its owner alone to read; print none")
    add("--tiers", type=int, choices=(3, 5), help="number of tiers (default: 5 where the engine runs enough requests)")
    add(
        "--requests",
        type=whole_number("number of requests", 1, MOST_REQUESTS),
        metavar="N",
        help="requests that the engine, or each of several, runs at once, if it does not say",
    )
    add(
        "--engine",
        choices=tuple(ENGINES),
        help="which engine it is, if its pages do not say, or if none is running yet",
    )
    speed = "speed of the engine, from `sidecar doctor --engine-model FILE`: its interactive tier gets an slo to hold"
    add("--engine-model", metavar="FILE", help=speed)
    add_key(parser, "API key of the engine, sent as `Authorization: Bearer KEY`", _KEYS)
    add("--json", metavar="FILE", help="also write what was done as JSON, - for standard output; only - has the keys")


def run(args: argparse.Namespace) -> int:
    """Writes the files. See the module for the exit codes."""
    if args.folder is not None and args.dir is not None:
        args.refuse(f"give the folder once: DIR {args.folder}, or --dir {args.dir}")
    if args.example and args.keys_to is not None:
        args.refuse("--keys-to does not go with --example, whose keys everyone knows")
    args.dir = args.folder or args.dir or "policies"
    try:
        figures = _example(args) if args.example else _starter(args)
    except (CannotLook, ValueError, FileNotFoundError) as error:
        raise CommandFailed(f"{error}; nothing was written") from None
    if args.json not in (None, STANDARD_OUTPUT) or args.keys_to is not None:
        figures = {**figures, "tenants": [{**one, "key": None} for one in figures["tenants"]]}
    return 0 if write_json(args.json, figures) else 1


def _example(args: argparse.Namespace) -> dict[str, Any]:
    shipped = shipped_policies()
    paths = (path for path in shipped.rglob("*") if path.suffix in (".yaml", ".json"))
    files = {str(path.relative_to(shipped)): path.read_text("utf-8") for path in paths}
    written = write_files(Path(args.dir), files, load_files)
    if args.json != STANDARD_OUTPUT:
        say("\n".join([*(f"wrote {path}" for path in written), "", "its keys are for trying out: everyone knows them"]))
    return {"files": written, "tenants": []}


def _starter(args: argparse.Namespace) -> dict[str, Any]:
    """Reads the engine, writes the files and prints what was done. Returns the same as figures."""
    folder = Path(args.dir)
    _refuse_existing(folder, [POOL_FILE])  # before anything is asked of the engine
    reads, is_sidecar = _asked(args) if args.upstream else ([_unasked(args)], False)
    given = args.requests or (None if args.upstream else EMULATED_REQUESTS)
    sizes = [given or read.gauges.max_running for read in reads]
    at_once = None if None in sizes else sum(size or 0 for size in sizes)
    read, names, models = reads[0], [], dict[str, list[str]]()
    if len(reads) == 1:
        capacity = _capacity(read, given)
    else:
        names = engine_names(args.upstream)
        models = dict(engines_by_model(names, reads))
        capacity = recommended_engines(args.upstream, names, [_capacity(one, given) for one in reads], models)
    who = "the engine runs" if len(reads) == 1 else "the engines together run"
    tiers = tiers_for(args.tiers, at_once, who, preempts=not args.mounted)  # no app expects a request twice
    tiers = with_promise(tiers, _promise(args.engine_model), at_once)
    by_tenant = tier_by_tenant(args.tenants, tiers.bodies)
    if args.anonymous not in (DENY, *tiers.bodies):
        raise ValueError(f"--anonymous: there is no tier {args.anonymous}; write deny, {' or '.join(tiers.bodies)}")
    keys = {name: new_key() for name in by_tenant}
    origin = _origin(args, read, at_once, is_sidecar=is_sidecar)
    files = {f"{TENANTS}/{name}.yaml": tenant_file(name, tier, keys[name]) for name, tier in by_tenant.items()}
    files[POOL_FILE] = pool_file(origin, read.engine, capacity, tiers, args.anonymous, is_mounted=args.mounted)
    with written_keys(args.keys_to, keys) as key_files:
        written = write_files(folder, files, _check)
    figures = {
        "engine": read.engine.name,
        "is_sidecar": is_sidecar,
        "engines": [{"name": name, "url": url} for name, url in zip(names, args.upstream or (), strict=False)],
        "models": list(models),
        "capacity": {"yaml": capacity.yaml, "reason": capacity.reason},
        "tiers": {"names": list(tiers.bodies), "reason": tiers.reason},
        "anonymous": args.anonymous,
        "files": written,
        "tenants": [
            {"tenant": name, "tier": tier, "key": keys[name], "key_file": key_files.get(name)}
            for name, tier in by_tenant.items()
        ],
    }
    if args.json != STANDARD_OUTPUT:
        say(_text(args, origin, figures).rstrip())
    return figures


def _promise(engine_model: str | None) -> str | None:
    """Promise that an engine of that model can keep. Raises BadEngineModel, which is a ValueError."""
    if engine_model is None:
        return None
    from sidecar.tools.doctor.probe import predicted, promise
    from sidecar.tools.step_model.model import load_model

    return promise(predicted(load_model(engine_model)))


def _asked(args: argparse.Namespace) -> tuple[list[Survey], bool]:
    """See `_read_all`."""
    import asyncio  # and an HTTP client below: without --upstream no one is asked

    return asyncio.run(_read_all(args))


async def _read_all(args: argparse.Namespace) -> tuple[list[Survey], bool]:
    """The engines' pages, and whether a sidecar answers one of them.

    Raises CannotLook, and CannotWrite for engines that fit in no policy together.
    """
    reads = [await _read(args, url) for url in args.upstream]
    surveys = [read for read, _ in reads]
    if reason := disagreement(args.upstream, surveys):
        raise CannotWrite(reason)
    return surveys, any(is_sidecar for _, is_sidecar in reads)


async def _read(args: argparse.Namespace, url: str) -> tuple[Survey, bool]:
    """An engine's pages, without a figure that no engine has; and whether a sidecar answers. Raises CannotLook."""
    import aiohttp

    from sidecar.tools.loadgen.pages import HttpPages

    key, _ = key_given(args.key, args.key_file, variables=_KEYS)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session:
        pages = HttpPages(session, url, headers)
        read = await survey(pages, None if args.engine is None else ENGINES[args.engine])
    is_believable = (read.gauges.max_running or 0) <= MOST_REQUESTS
    believed = read if is_believable else replace(read, gauges=replace(read.gauges, max_running=None))
    return believed, pages.is_sidecar


def _unasked(args: argparse.Namespace) -> Survey:
    """An engine that is not running yet: it is asked nothing."""
    engine = ENGINES[args.engine or ("none" if args.mounted else "vllm")]
    if args.requests is None and (args.mounted or not engine.carriers):
        asking, server = ("--mounted", "engine") if args.mounted else (f"--engine {engine.name}", "server")
        raise CannotWrite(f"{asking} needs --requests N, the requests that the {server} runs at once")
    return Survey(Identity(engine, "the command line", None), engine, Facts(), Gauges())


def _origin(args: argparse.Namespace, read: Survey, at_once: int | None, *, is_sidecar: bool) -> str:
    """Origin of the policy, printable, whatever the engine's pages hold."""
    if args.mounted:
        of_kind = f" of {read.engine.title}" if read.engine.carriers else ""
        return f"the middleware in an app of your own, whose engine{of_kind} runs {at_once:,} requests at once"
    if args.upstream is None and args.engine is None:
        return f"an emulated engine: {_emulate(read.engine.name, at_once)}"
    if args.upstream is None:
        assumed = "" if args.requests else ", which --requests N changes"
        return f"{read.engine.name} with {at_once} requests at once{assumed}; no engine was asked"
    name, upstream = printable(read.name), printable(args.upstream[0], 200)
    first = f"{name} after an admission sidecar at {upstream}" if is_sidecar else f"{name} at {upstream}"
    return first if len(args.upstream) == 1 else f"{len(args.upstream)} engines, the first of them {first}"


def _emulate(engine: str, at_once: int | None) -> str:
    """The command that runs an emulated engine of this size."""
    return f"sidecar emulate --engine {engine} --max-num-seqs {at_once}"


def _capacity(read: Survey, given: int | None) -> Recommendation:
    """As `sidecar doctor` recommends it without a burst. `given` is how many requests run at once, where known."""
    gauges = read.gauges
    if given is not None and gauges.kv_tokens is not None:
        why = f"tokens as the engine reports them; {given:,} requests run at once, and {WAITING} may wait in the engine"
        return Recommendation(f"capacity: {{from: engine, requests: {given + WAITING}}}", why)
    if given is not None:
        return Recommendation(
            f"capacity: {{requests: {given}}}",
            f"{given:,} requests run at once; the tokens of the KV cache are not known",
        )
    found = recommend(gauges, None, Queueing.TOO_LITTLE, read.others)
    if found is None:
        raise CannotWrite("; ".join([f"{read.engine.name} {_SAYS_NOTHING}", *read.unread, _GIVE_REQUESTS]))
    if gauges.max_running is None:
        return Recommendation(found.yaml, f"{gauges.kv_tokens:,} tokens, as the engine reports them; {_UNBOUNDED}")
    return found


def write_files(folder: Path, files: Mapping[str, str], check: Callable[[Path], object]) -> list[str]:
    """Writes all files or none, and returns their paths.

    They are written into a folder of their own, where `check` may refuse them by an exception, and then linked to their
    places. A link never replaces a file. Raises CannotWrite for what cannot be written.
    """
    _refuse_existing(folder, files)
    with _all_or_none(folder) as made:
        _make(folder / TENANTS, made)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".sidecar-init-") as staged:
            for name, text in files.items():
                path = Path(staged, name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
            check(Path(staged))
            for name in sorted(
                files, key=lambda name: name == POOL_FILE
            ):  # last, so that it never names half its tenants
                os.link(Path(staged, name), folder / name)
                made.append(folder / name)
    return [str(folder / name) for name in sorted(files)]


@contextmanager
def written_keys(folder: str | None, keys: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Writes each tenant's key to a file of its own, none without a folder: their paths, by tenant.

    They are gone again where the block raises. Raises CannotWrite.
    """
    if folder is None:
        yield {}
        return
    paths = {name: Path(folder, f"{name}.key") for name in keys}
    with _all_or_none(Path(folder)) as made:
        _make(Path(folder), made)
        for name, path in paths.items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                made.append(path)
                file.write(f"{keys[name]}\n")
        yield {name: str(path) for name, path in paths.items()}


@contextmanager
def _all_or_none(folder: Path) -> Iterator[list[Path]]:
    """Removes the files that the block adds to the list, if it raises. An OSError becomes CannotWrite."""
    made: list[Path] = []
    try:
        yield made
    except BaseException as failure:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        if isinstance(failure, FileExistsError) and failure.filename != str(folder):
            raise CannotWrite(_EXISTS.format(failure.filename2 or failure.filename)) from None
        if isinstance(failure, OSError):
            raise CannotWrite(f"cannot write into {folder}: {failure.strerror or failure}; name another") from None
        raise


def _make(folder: Path, made: list[Path]) -> None:
    """Makes a folder, and those around it."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir()
        made.append(path)


def _refuse_existing(folder: Path, names: Sequence[str] | Mapping[str, str]) -> None:
    """Refuses a folder that has a policy, or tenants that would become part of the new one."""
    there = [folder / name for name in names if os.path.lexists(folder / name)]
    there += sorted(folder.glob(f"{TENANTS}/*.yaml"))
    if there:
        raise CannotWrite(_EXISTS.format(there[0]))


def _check(folder: Path) -> None:
    """Refuses a starter policy that does not fit, such as five tiers for a pool of three requests."""
    try:
        policy = load(folder)
        # Engines are as they are, and an engine of one request takes none with two sequences, whatever the tiers are.
        found = [one for one in warnings(policy) if not one.path.startswith("engines.") and policy.rules.requests > 1]
    except PolicyError as refused:
        found = list(refused.problems)
    if found:
        raise CannotWrite(f"these tiers do not fit this pool: {found[0].path}: {found[0].message} (try --tiers 3)")


def _text(args: argparse.Namespace, origin: str, figures: Mapping[str, Any]) -> str:
    """Summary of the files written, and the next steps."""
    engine, folder = ENGINES[figures["engine"]], shlex.quote(args.dir)
    port, admin = free_port(CLIENTS_PORT, args.upstream), free_port(ADMIN_PORT, args.upstream)
    upstream = "" if figures["engines"] else f"--upstream {shlex.quote((args.upstream or [_ENGINE_URL])[0])} "
    ports = f"{_option('--port', port, CLIENTS_PORT)}{_option('--admin-port', admin, ADMIN_PORT)}"
    with_key = "SIDECAR_ENGINE_KEY=... " if args.key or args.key_file else ""
    emulates = args.upstream is None and bool(engine.carriers) and engine in BUILT_IN
    at_admin = f"http://127.0.0.1:{admin}"
    # Of several models each has a pool, and a report, of its own.
    pools = [f"{at_admin}/models/{model}" for model in figures["models"]] or [at_admin]
    return render(
        "init.txt",
        origin=origin,
        **figures,
        folder=folder,
        file=shlex.quote(str(Path(args.dir, POOL_FILE))),
        keys=_keys(figures["tenants"]),
        port=port,
        admin=admin,
        is_mounted=args.mounted,
        can_be_emulated=bool(engine.carriers),
        mounts=f"app.add_middleware(AdmissionMiddleware, policy={args.dir!r})",
        emulates=_emulate(engine.name, args.requests or EMULATED_REQUESTS) if emulates else "",
        is_chosen=args.engine is not None,
        serves=f"{with_key}sidecar serve {upstream}--policy {folder}{ports}",
        reports_at=["" if pool == ADMIN else f" --admin {shlex.quote(pool)}" for pool in pools],
        at_admin="" if admin == ADMIN_PORT else f" --admin {at_admin}",
    )


def _option(name: str, value: int, default: int) -> str:
    return "" if value == default else f" {name} {value}"


def _keys(tenants: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Tenants with their tiers, and their keys, or where those are."""
    return table([(one["tenant"], one["tier"], one["key_file"] or one["key"]) for one in tenants], range(3), "  ")


def free_port(first: int, upstreams: Sequence[str] | None = None) -> int:
    """The first port from `first` on that no one listens on here, and that is not an upstream's."""
    in_use = {urlsplit(upstream).port for upstream in upstreams or ()}
    ports = range(first, first + _PORTS_TRIED)
    return next((port for port in ports if port not in in_use and _is_free(port)), first)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _tenants(text: str) -> Mapping[str, str | None]:
    """Names and their tiers: `chat,tools=normal,nightly`."""
    found: dict[str, str | None] = {}
    for part in text.split(","):
        name, equals, tier = (piece.strip() for piece in part.partition("="))
        try:
            TypeAdapter(TenantName).validate_python(name)
        except ValidationError as refused:
            raise argparse.ArgumentTypeError(str(refused.errors()[0]["ctx"]["error"])) from None
        if name.casefold() in map(str.casefold, found):  # its file's name must differ on every file system
            raise argparse.ArgumentTypeError(f"the tenant {name} is named twice; write each name once")
        if equals and not re.fullmatch(r"[a-z]+", tier):
            raise argparse.ArgumentTypeError(f"{part!r} names no tier; write NAME or NAME=TIER, such as nightly=batch")
        found[name] = tier or None
    return found
