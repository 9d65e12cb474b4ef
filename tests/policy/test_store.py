from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.policy.choices import StoreLoss
from sidecar.policy.compiler import load, load_files
from sidecar.policy.pool_file import PoolFile
from sidecar.policy.problems import PolicyError, masked
from sidecar.policy.schema import schema_document
from sidecar.policy.store import OPTIONS, SCHEMES, StoreAddress, StoreKind, store_address
from tests.policy.files import SMALL, mistakes, pool
from tests.support.each import each

SERVER = StoreAddress(StoreKind.SERVER, (("host", 6379),))
SENTINELS = StoreAddress(StoreKind.SENTINEL, (("a", 26379), ("b", 26380)), master_name="main")
NODES = StoreAddress(StoreKind.CLUSTER, (("a", 6379), ("b", 6380)))
UNIX = StoreAddress(StoreKind.SOCKET, path="/run/redis.sock")
CA = ("ssl_ca_certs", "/etc/ca.pem")


@each(
    ("text", "address"),
    [
        ("redis://host", SERVER),
        ("redis://host/", SERVER),
        ("redis://host:6379/0", SERVER),
        ("REDIS://host", SERVER),
        ("redis://my_redis.internal-1:7000/12", replace(SERVER, nodes=(("my_redis.internal-1", 7000),), db=12)),
        ("redis://[::1]", replace(SERVER, nodes=(("::1", 6379),))),
        ("redis://[fe80::1%25eth0]:7000", replace(SERVER, nodes=(("fe80::1%eth0", 7000),))),
        ("redis://user:pass@host", replace(SERVER, username="user", password="pass")),
        ("redis://:pass@host", replace(SERVER, password="pass")),
        ("redis://u%3Ax:p%40%2F%3a%25+:&=é@host", replace(SERVER, username="u:x", password="p@/:%+:&=é")),
        ("rediss://host", replace(SERVER, tls=True)),
        (
            "rediss://host?ssl_ca_certs=/etc/ca.pem&ssl_cert_reqs=required&ssl_check_hostname=false",
            replace(SERVER, tls=True, options=(CA, ("ssl_cert_reqs", "required"), ("ssl_check_hostname", False))),
        ),
        (
            "rediss://host/1?ssl_certfile=/my%20own/c.pem&ssl_keyfile=/k.pem",
            replace(SERVER, tls=True, db=1, options=(("ssl_certfile", "/my own/c.pem"), ("ssl_keyfile", "/k.pem"))),
        ),
        ("unix:///run/redis.sock", UNIX),
        ("unix:///run/redis.sock?db=3", replace(UNIX, db=3)),
        ("unix:///run/redis%40main/a%20b", replace(UNIX, path="/run/redis@main/a b")),
        ("unix://user:pass@/run/redis.sock", replace(UNIX, username="user", password="pass")),
        ("redis+sentinel://a,b:26380/main", SENTINELS),
        ("redis+sentinel://:pass@a,b:26380/main/2", replace(SENTINELS, password="pass", db=2)),
        ("rediss+sentinel://a,b:26380/main", replace(SENTINELS, tls=True)),
        (
            "rediss+sentinel://[::1],a:1/m?sentinel_username=u&sentinel_password=p%26+&ssl_ca_certs=/etc/ca.pem",
            StoreAddress(
                StoreKind.SENTINEL,
                (("::1", 26379), ("a", 1)),
                tls=True,
                master_name="m",
                options=(("sentinel_username", "u"), ("sentinel_password", "p&+"), CA),
            ),
        ),
        ("redis+cluster://a,b:6380", NODES),
        ("redis+cluster://user:pass@a,b:6380/0", replace(NODES, username="user", password="pass")),
        ("rediss+cluster://a,b:6380", replace(NODES, tls=True)),
    ],
)
def test_an_address_is_read(text: str, address: StoreAddress) -> None:
    assert address == store_address(text)


@each(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host", "redis://user:***@host:6379/0"),
        ("rediss://:hunter2@[::1]:7000/3", "rediss://:***@[::1]:7000/3"),
        ("unix://us%40er:hunter2@/run/a%20b?db=1", "unix://us%40er:***@/run/a%20b?db=1"),
        ("redis+cluster://:hunter2@a,b", "redis+cluster://:***@a:6379,b:6379"),
        (
            "rediss+sentinel://:hunter2@a/main?sentinel_username=u&sentinel_password=hunter2&ssl_check_hostname=true",
            "rediss+sentinel://:***@a:26379/main/0?sentinel_username=u&sentinel_password=***&ssl_check_hostname=true",
        ),
    ],
)
def test_as_text_an_address_is_whole_but_for_its_passwords(text: str, shown: str) -> None:
    address = store_address(text)
    assert shown == str(address) == f"{address}"
    assert f"StoreAddress({shown!r})" == repr(address)


HOST = "; write it as host:6379, an IPv6 address as [::1]:6379"
DATABASE = "the database is not a number, or not 0 in a cluster, which has no other; write one such as 0"
SOCKET = "the socket is not the whole path of a file; write one such as unix:///run/redis.sock"
CODE = " that begins no code of UTF-8; write the % itself as %25, and an @ as %40"
OPTION = "a query option that such an address does not have"
NO_PASSWORD = "an @ without a password before it; write user:password@, or :password@ for a password alone"


@each(
    ("text", "said"),
    [
        ("redis:/host", '"redis:/host" is not a store\'s address; write redis://127.0.0.1:6379/0'),
        ("", '"" is not a store\'s address; write redis://127.0.0.1:6379/0'),
        ("127.0.0.1:6379", '"127.0.0.1:6379" is not a store\'s address; write redis://127.0.0.1:6379/0'),
        ("redis:/:hunter2@host", "this is not a store's address; write redis://127.0.0.1:6379/0"),
        ("redis:/:hunter2%40host", "this is not a store's address; write redis://127.0.0.1:6379/0"),
        ("host?sentinel_password=hunter2", '"host" is not a store\'s address; write redis://127.0.0.1:6379/0'),
        ("reddis://:hunter2@host", '"reddis" is no scheme; did you mean "redis"?'),
        (
            "postgres://:hunter2@host",
            '"postgres" is no scheme; the schemes are redis, rediss, unix, redis+sentinel, rediss+sentinel, '
            "redis+cluster, rediss+cluster",
        ),
        (
            "redis://:hun ter2@host",
            "a space, a # or a character that cannot be printed does not belong in a store's address; "
            "write it as %20, %23 or the like",
        ),
        ("redis://", f"the host cannot be read{HOST}"),
        ("redis:///0", f"the host cannot be read{HOST}"),
        ("redis://::1", f"the host cannot be read{HOST}"),
        ("redis://:hunter2", f"the host cannot be read{HOST}"),
        ("redis://host:x", f"the host cannot be read{HOST}"),
        ("redis://h\N{CYRILLIC SMALL LETTER O}st", f"the host cannot be read{HOST}"),
        ("redis://[::g]", f"the host cannot be read{HOST}"),
        ("redis://[%zz]", f"a % in the host{CODE}"),
        ("redis://host:0", f"the host cannot be read{HOST}"),
        ("redis+sentinel://a,b:65536/m", f"host 2 cannot be read{HOST.replace('6379', '26379')}"),
        ("redis+cluster://a,,b", f"host 2 cannot be read{HOST}"),
        (
            "redis://a,b",
            "several hosts are not one server; write redis+sentinel:// or redis+cluster:// before them",
        ),
        ("redis://hunter2@host", NO_PASSWORD),
        ("redis://user:@host", NO_PASSWORD),
        ("redis://:hunter2%@host", f"a % in the password{CODE}"),
        ("redis://%ff:hunter2@host", f"a % in the user{CODE}"),
        ("redis://host/zero", DATABASE),
        ("redis://host/0/", DATABASE),
        ("redis://host/-1", DATABASE),
        ("redis+cluster://host/2", DATABASE),
        (
            "redis+sentinel://host/",
            "the master's name is missing, or is none that sentinels know (A-Z, a-z, 0-9 and . _ -); "
            "write it after the hosts, such as redis+sentinel://127.0.0.1:26379/mymaster/0",
        ),
        ("redis+sentinel://host/main/x", DATABASE),
        ("unix://run/redis.sock", SOCKET),
        ("unix://", SOCKET),
        ("unix:///a%00b", SOCKET),
        ("unix:///a?db=x", DATABASE),
    ],
)
def test_a_wrong_address_says_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        store_address(text)


@each(
    ("text", "said"),
    [
        ("redis://host?", "an option without a value; write name=value, and a & inside a value as %26"),
        ("rediss://host?ssl_ca_cert=/a", f'{OPTION}; did you mean "ssl_ca_certs"?'),
        (
            "rediss://host?timeout=5",
            f"{OPTION}; its options are ssl_ca_certs, ssl_certfile, ssl_keyfile, ssl_cert_reqs, ssl_check_hostname",
        ),
        ("redis://host?ssl_cert_reqs=none", f"{OPTION}; it has none; remove it"),
        ("redis://host?db=1", f"{OPTION}; it has none; remove it"),
        ("redis+cluster://host?sentinel_password=hunter2", f"{OPTION}; it has none; remove it"),
        ("unix:///s?sentinel_password=hunter2", f"{OPTION}; its options are db"),
        ("rediss://host?ssl_ca_certs", "an option without a value; "),
        ("rediss://host?ssl_ca_certs=", "an option without a value; "),
        ("rediss://host?ssl_ca_certs=ca.pem", "ssl_ca_certs is not the whole path of a file; write one such as /etc/"),
        ("rediss://host?ssl_ca_certs=/a&ssl_ca_certs=/b", "ssl_ca_certs is written twice; keep one of them"),
        (
            "rediss://host?ssl_cert_reqs=maybe",
            "ssl_cert_reqs is none of none, optional, required; write one of them, such as ssl_cert_reqs=required",
        ),
        (
            "rediss://host?ssl_check_hostname=yes",
            "ssl_check_hostname is none of false, true; write one of them, such as ssl_check_hostname=true",
        ),
        ("rediss://host?ssl_keyfile=/k", "ssl_keyfile does nothing without ssl_certfile; write that, too"),
        (
            "rediss://host?ssl_cert_reqs=none&ssl_check_hostname=true",
            "ssl_check_hostname=true checks a certificate, and ssl_cert_reqs=none asks for none; remove one",
        ),
        (
            "redis+sentinel://a/m?sentinel_username=u",
            "sentinel_username does nothing without sentinel_password; write that, too",
        ),
        ("redis+sentinel://a/m?sentinel_password=a&hunter2", "an option without a value; "),
        ("redis+sentinel://a/m?sentinel_password=a&hunter2=", "an option without a value; "),
    ],
)
def test_a_wrong_option_says_what_would_be_right(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}") as refused:
        store_address(text)
    assert "hunter2" not in str(refused.value)


@each(
    "text",
    [
        "redis://u:hunter2@1@host",
        "redis://u:1/hunter2@host",
        "redis://u:1?hunter2@host",
        "redis://u:1?a=hunter2@host",
        "redis+cluster://u:hunter2@a,u:hunter2@b",
        "unix://u:1/hunter2@/run/redis.sock",
        "unix://u:a@/hunter2@/run/redis.sock",
        "unix:///u:hunter2@/run/redis.sock",
    ],
)
def test_a_password_whose_end_no_one_can_tell_is_refused_with_how_to_write_it(text: str) -> None:
    said = "an @ that is not the one before the host or the path; name user and password once, there, write every"
    with pytest.raises(ValueError, match=f"^{re.escape(said)} other @ as %40") as refused:
        store_address(text)
    assert "hunter2" not in str(refused.value)


def outcome(text: str) -> str:
    """What is shown of an address, or said of its mistake. Subclasses of ValueError are the library's own words."""
    try:
        return repr(store_address(text))
    except ValueError as refused:
        if type(refused) is not ValueError or refused.__cause__:
            raise
        return str(refused)


_PIECES = st.sampled_from(
    [
        *(f"{scheme}://" for scheme in SCHEMES),
        *(f"{name}=" for name in OPTIONS),
        *("host", "[::1]", "[", "]", "/", "?", "@", ":", ",", "&", "=", "%40", "%", "%ff", "%00", "#", " ", "\ud800"),
        *("6379", "true", "none", "main", "user", "redis", "/run/redis.sock", "\n", "0", "99999999999", "é", "٣"),
    ]
)
_TEXTS = st.text() | st.lists(_PIECES, max_size=12).map("".join)


@given(_TEXTS)
def test_any_text_is_an_address_or_says_what_would_be_right(text: str) -> None:
    said = outcome(text)
    assert said.isprintable()
    assert said.startswith("StoreAddress('") or "; " in said


_NAMES = st.from_regex(r"[a-z][a-z0-9._-]{0,9}", fullmatch=True)
_ADDRESSES = st.builds(
    lambda scheme, hosts, port, master, db: (
        f"unix:///{master}?db={db}"
        if scheme == "unix"
        else f"{scheme}://{','.join(hosts) if '+' in scheme else hosts[0]}:{port}"
        + (f"/{master}" if "sentinel" in scheme else "")
        + ("" if "cluster" in scheme else f"/{db}")
    ),
    st.sampled_from(list(SCHEMES)),
    st.lists(_NAMES | st.ip_addresses(v=6).map("[{}]".format), min_size=1, max_size=3),
    st.integers(1, 65535),
    _NAMES,
    st.integers(0, 10**8),
)


@given(_ADDRESSES)
def test_the_text_of_an_address_without_a_password_reads_back_as_the_same_address(text: str) -> None:
    address = store_address(text)
    assert address == store_address(str(address))


_AROUND = st.lists(_PIECES | st.characters(), max_size=4).map("".join)


@given(st.sampled_from([*(f"{scheme}://" for scheme in SCHEMES), "redis:/", "redi://", ""]), _AROUND, _AROUND, _AROUND)
def test_a_password_is_in_no_text_and_in_no_refusal(begin: str, user: str, around: str, end: str) -> None:
    """However it is quoted or not, wherever an @ or a slash in it cuts the address."""
    assert "hunter2" not in outcome(f"{begin}{user}:{around}hunter2{around}@host{end}")


def test_a_pool_without_a_store_lives_in_this_process(tmp_path: Path) -> None:
    policy = load(pool(tmp_path))
    assert (policy.store, policy.pool, policy.on_store_loss) == (None, "default", StoreLoss.DIVIDE)


def test_a_policy_names_its_store_its_pool_and_what_happens_without_the_store(tmp_path: Path) -> None:
    text = f"{SMALL}store: redis://:pass@host/1\npool: chat-70b\non_store_loss: closed\n"
    policy = load(pool(tmp_path, text))
    assert replace(SERVER, password="pass", db=1) == policy.store
    assert (policy.pool, policy.on_store_loss) == ("chat-70b", StoreLoss.CLOSED)


def test_the_stores_name_and_loss_may_stand_without_a_store_which_the_environment_may_name(tmp_path: Path) -> None:
    policy = load(pool(tmp_path, f"{SMALL}pool: chat-70b\non_store_loss: closed\n"))
    assert (policy.store, policy.pool) == (None, "chat-70b")
    for name in ("store", "pool", "on_store_loss"):
        assert "SIDECAR_STORE" in schema_document(PoolFile)["properties"][name]["description"]


@each(
    ("line", "said"),
    [
        ("store: redis:/host", 'store: "redis:/host" is not a store\'s address; write redis://127.0.0.1:6379/0'),
        ("store: 6379", "store: not a store's address; write redis://127.0.0.1:6379/0"),
        ("store: [redis://host]", "store: not a store's address; write redis://127.0.0.1:6379/0"),
        ("stroe: redis://host", 'stroe: no such key; did you mean "store"?'),
        ("pool: 70", "pool: 70 is not a pool's name; put it in quotes, or write chat-70b"),
        (
            'pool: "{chat}"',
            'pool: "{chat}" is not a pool\'s name; write up to 100 of A-Z, a-z, 0-9 and . _ -, a letter or a digit '
            "first",
        ),
        ("on_store_loss: close", 'on_store_loss: "close" is no choice; did you mean "closed"?'),
        ("on_store_loss: open", 'on_store_loss: "open" is no choice; the choices are divide, closed'),
    ],
)
def test_a_wrong_line_says_what_would_be_right(tmp_path: Path, line: str, said: str) -> None:
    assert [f"policy.yaml:7: {said}"] == mistakes(pool(tmp_path, f"{SMALL}{line}\n"))


@each(
    "lines",
    [
        "store: redis://:hunter2@host:x",
        "store: postgres://:hunter2@host",
        "store: redis:/:hunter2@host",
        "store: {redis://:hunter2@host: 1}",
        "store: [redis://:hunter2@host]",
        "pool: redis://:hunter2@host",
        "on_store_loss: redis://:hunter2@host",
        "tenants: redis://:hunter2@host",
        "tier_header: redis://:hunter2@host",
        "tokenizer: redis://:hunter2@host",
        "engine_levels: {redis://:hunter2@host: 1}",
        "{store:redis://:hunter2@host}: 1",
        '"store:redis://:hunter2@host": 1',
        "store:redis://:hunter2@host",
        "store: redis://:hunter2@host: 6379",
        "store: redis://:hunter2@host\nstore: redis://:hunter2@host",
        "redis://:hunter2@host:\nno: redis://:hunter2@host",
    ],
)
def test_no_mistake_repeats_a_password_wherever_the_address_was_written(tmp_path: Path, lines: str) -> None:
    with pytest.raises(PolicyError) as refused:
        load(pool(tmp_path, f"{SMALL}{lines}\n"))
    assert "hunter2" not in f"{refused.value} {refused.value!r} {refused.value.problems}"


def test_what_was_loaded_shows_no_password(tmp_path: Path) -> None:
    loaded = load_files(pool(tmp_path, f"{SMALL}store: redis://:hunter2@host\n"))
    assert "redis://:***@host:6379/0" in repr(loaded)
    assert "hunter2" not in repr(loaded)


@each(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host/0", "redis://***@host/0"),
        ("redis:/user:hun@ter2@host", "redis:/***@host"),
        ("team@example", "team@example"),
        ("redis://host", "redis://host"),
    ],
)
def test_only_what_stands_between_an_addresses_beginning_and_its_at_sign_is_masked(text: str, shown: str) -> None:
    assert shown == masked(text)
