"""Configuration as frozen dataclasses; ``"auto"`` is resolved once, before freezing.

Called by the command line and by :class:`duckllm.LLM`; knows nothing of models, sockets or tensors.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from duckllm.errors import ConfigError, InWords

WIRE_DTYPES = ("f32", "bf16")
LOSSLESS_FORMATS = ("fp9", "fp8")  # of e4m3 weights, as they are
# What each is, duckllm.weights.formats says.
WEIGHT_FORMATS = (*LOSSLESS_FORMATS, "int8", "int4", "int4-bf16", "int4-zero", "int4-zero-bf16", "mxfp4")
SCALE_LAYOUTS = (
    "block",
    "channel",
    "group",
)  # one scale for 128 x 128 weights, a row of a matrix, or a group
PREFILLS = ("f32", "bf16")  # csrc/kernels/experts.h says what each computes
FORMAT_CHOICES = ("auto", *WEIGHT_FORMATS)
DRAFTS = ("auto", "on", "off", "stateless")
LANES = ("auto", "on", "off")
MAX_DRAFT_TOKENS = 8
MAX_WORKERS = 1024
MAX_THREADS = 1024
MAX_STEP_TOKENS = 65536
MAX_TIMEOUT_S = 1_000_000
CLUSTERS = ("local", "static", "ray", "discover")
SHARES = ("auto", "even")  # or numbers
MAX_SHARE = 1_000_000
_DISCOVER = re.compile(r"discover:[0-9.]{7,15}", re.ASCII)
_GROUP = re.compile(r"([0-9.]+):(\d{1,5})(?:@([0-9.]+))?", re.ASCII)
_OF_THE_NETWORK = ipaddress.IPv4Network("224.0.0.0/24")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*([KMGT](?:i?B)?)?B?", re.IGNORECASE | re.ASCII)
_WHOLE = re.compile(r"\d{1,9}", re.ASCII)
_DECIMAL = re.compile(r"(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(?:e[+-]?\d{1,2})?", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class ClusterConfig:
    """How the workers come to be and how the host speaks with them.

    Args:
        workers: Number of workers to start, when ``addresses`` is empty; 0 with Ray for one on each node, and
            with ``"discover"`` for every node that is found.
        addresses: Addresses of running workers, ``"name:port"``; empty means "start them".
        cluster: ``"local"`` starts the workers here, ``"static"`` takes those at ``addresses``, ``"ray"`` or
            ``"ray:name:port"`` has Ray place them on nodes, ``"discover"`` finds those that announce
            themselves, ``"discover:10.0.0.1"`` on one network of this host; None decides by ``addresses``.
        threads_per_worker: Compute threads of each worker started here or by Ray; 0 divides the cores of a
            machine among its workers.
        spin_us: How long an idle thread spins before it sleeps, microseconds; -1 decides by the cores.
        wire_dtype: Activations on the wire, ``"f32"`` or ``"bf16"``.
        reply_dtype: Partial sums on the wire, ``"f32"`` or ``"bf16"``.
        weight_format: Format in which experts are computed. ``"fp9"`` or ``"fp8"``: a copy is made in memory
            where the model is stored in the other; ``"auto"`` takes what is stored, unless that is one of
            these two, the slice is large, and a copy in the other has room and was measured to be faster by
            5 %. Formats of fewer bits are what a model was converted into: a checkpoint is, into
            ``"int8"`` or ``"int4"``, where one of these is asked for; nothing else ever rounds. A worker's
            own ``--format`` goes before.
        prefill: What the experts of a prompt are computed with, in this process or on workers started here:
            ``"f32"``, or ``"bf16"``, which rounds activations and needs a CPU with AVX512-BF16 or AMX-BF16. A
            worker elsewhere decides by its own ``--prefill``.
        max_step_tokens: Most tokens in one step.
        shares: How the experts are shared out: ``"even"``, a number for each worker, or ``"auto"``, by the
            speeds that workers at addresses say, where they differ by more than 15 %, and in any case bounded
            by their memory.
        share_folder: Whether workers may open the host's model folder by its path, where they find it; else
            they use their own, their node's cache, or what the host sends them.
        shared_memory: Whether workers started here get their steps through memory shared with them, instead
            of through their connection.
        multicast: ``"off"``, or a group to which requests go once for all workers, by UDP, instead of to
            each: ``"239.77.0.1:7400"``, with ``"@"`` and an address of this host where the workers are behind
            several of its interfaces.
        spares: Workers that wait to take a lost one's place: so many more are started here, or the last of
            ``addresses``, or of the nodes that are found.
        min_workers: With ``"discover"``, no plan is made before there are so many nodes.
        discover_wait_s: With ``"discover"``, how long nodes are waited for, seconds; where enough have come,
            only until no other has for a moment.
        connect_timeout_s: Limit for connecting and for each message before the first step, seconds.
        prepare_timeout_s: Limit for a worker to map and verify its weights, seconds; taking what it is sent
            is a sign of life.
        step_timeout_s: Limit for one step's answer of a worker that lives, seconds.
        worker_silence_s: A worker that has not answered a step for so long is asked whether it lives; one
            that does not say so for as long again is lost, seconds.
        worker_timeout_s: How long a request waits for a lost worker to come back, or for another in its
            place, before it fails, seconds.
        cluster_token: Shared secret; None where every worker is on loopback and has none.
    """

    workers: int = 2
    addresses: tuple[str, ...] = ()
    cluster: str | None = None
    threads_per_worker: int = 0
    spin_us: int = -1
    wire_dtype: str = "f32"
    reply_dtype: str = "f32"
    weight_format: str = "auto"
    prefill: str = "f32"
    max_step_tokens: int = 256
    shares: str | tuple[float, ...] = "auto"
    share_folder: bool = True
    shared_memory: bool = True
    multicast: str = "off"
    spares: int = 0
    min_workers: int = 1
    discover_wait_s: float = 30.0
    connect_timeout_s: float = 10.0
    prepare_timeout_s: float = 600.0
    step_timeout_s: float = 30.0
    worker_silence_s: float = 0.4
    worker_timeout_s: float = 30.0
    cluster_token: str | None = None

    def __post_init__(self) -> None:
        self._check_cluster()
        for field, least, most in (
            ("workers", 0 if self.kind in ("ray", "discover") else 1, MAX_WORKERS),
            ("min_workers", 1, MAX_WORKERS),
            ("threads_per_worker", 0, MAX_THREADS),
            ("spin_us", -1, 1_000_000),
            ("max_step_tokens", 1, MAX_STEP_TOKENS),
            ("spares", 0, MAX_WORKERS),
        ):
            value = getattr(self, field)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(field, value, f"a whole number from {least} to {most}")
        addresses = self.addresses
        if type(addresses) is not tuple or not all(isinstance(each, str) and each for each in addresses):
            raise ConfigError("addresses", addresses, "a tuple of addresses, name:port")
        if addresses and self.spares >= len(addresses):
            raise ConfigError("spares", self.spares, f"fewer than the {len(addresses)} addresses")
        for field, known in (
            ("wire_dtype", WIRE_DTYPES),
            ("reply_dtype", WIRE_DTYPES),
            ("weight_format", FORMAT_CHOICES),
            ("prefill", PREFILLS),
        ):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in known:
                raise ConfigError(field, value, "one of " + ", ".join(known))
        self._check_shares()
        for field in (
            *("connect_timeout_s", "prepare_timeout_s", "step_timeout_s"),
            *("worker_silence_s", "worker_timeout_s", "discover_wait_s"),
        ):
            value = getattr(self, field)
            if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT_S:
                raise ConfigError(field, value, f"a number above 0, at most {MAX_TIMEOUT_S}")
        for field in ("share_folder", "shared_memory"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(field, getattr(self, field), "True or False")
        if parse_multicast(self.multicast) is not None and self.kind == "local" and self.shared_memory:
            expected = "off with workers started here, which get their steps through shared memory"
            raise ConfigError("multicast", self.multicast, expected)
        if not isinstance(self.cluster_token, str | None):
            raise ConfigError("cluster_token", type(self.cluster_token).__name__, "text, or None")
        if self.cluster_token is not None and not is_utf8(self.cluster_token):
            raise ConfigError("cluster_token", InWords("text that UTF-8 cannot hold"), "valid text")

    def _check_cluster(self) -> None:
        cluster = self.cluster
        if cluster is not None and not (
            isinstance(cluster, str)
            and (cluster in CLUSTERS or cluster.startswith("ray:") or _DISCOVER.fullmatch(cluster))
        ):
            expected = f"{', '.join(CLUSTERS)}, ray:name:port or discover:10.0.0.1"
            raise ConfigError("cluster", cluster, expected)
        if self.kind == "static" and not self.addresses:
            raise ConfigError("workers", self.workers, "addresses, name:port,name:port, with cluster static")
        if cluster is not None and self.kind != "static" and self.addresses:
            raise ConfigError("workers", list(self.addresses), f"a number, with cluster {cluster}")
        if self.kind != "discover":
            for field in ("min_workers", "discover_wait_s"):
                value = getattr(self, field)
                if value != getattr(ClusterConfig, field):
                    raise ConfigError(field, value, "nothing without cluster discover")
        elif 0 < self.workers < self.min_workers:
            raise ConfigError("min_workers", self.min_workers, f"at most the {self.workers} workers")
        if self.kind in ("static", "discover"):
            for field in ("threads_per_worker", "spin_us", "prefill"):
                value = getattr(self, field)
                if value != getattr(ClusterConfig, field):
                    raise ConfigError(
                        field, value, "nothing with workers elsewhere, whose own options say so"
                    )
        if self.kind == "ray" and self.spares:
            raise ConfigError("spares", self.spares, "0 with Ray, which starts a lost worker on any node")

    @property
    def kind(self) -> str:
        """``"local"``, ``"static"``, ``"ray"`` or ``"discover"``."""
        if self.cluster is None:
            return "static" if self.addresses else "local"
        return self.cluster.partition(":")[0]

    @property
    def num_workers(self) -> int:
        """W, spares aside; 0 where Ray, or who is found, decides."""
        return len(self.addresses) - self.spares if self.addresses else self.workers

    def _check_shares(self) -> None:
        if isinstance(self.shares, str):
            good = self.shares in SHARES
        else:
            good = type(self.shares) is tuple and all(
                type(share) in (int, float) and 0 < share <= MAX_SHARE for share in self.shares
            )
        if not good:
            expected = f"auto, even, or a number for each worker, above 0 and at most {MAX_SHARE}"
            raise ConfigError("shares", self.shares, expected)


@dataclass(frozen=True)
class StepConfig:
    """What a step does beside the necessary to be faster; none of it changes a token.

    Args:
        draft: Whether the checkpoint's layer of multi-token prediction guesses tokens ahead: ``"on"``,
            ``"off"``, ``"auto"`` where there is such a layer and while it was measured to pay, or
            ``"stateless"``, which guesses without what was before and is there to be compared with.
        draft_tokens: Most tokens guessed at once.
        lanes: Whether a step is computed in two lanes, the one's attention while the workers compute the
            other's experts: ``"on"``, ``"off"``, or ``"auto"`` with workers and while it was measured to pay.
    """

    draft: str = "auto"
    draft_tokens: int = 1
    lanes: str = "auto"

    def __post_init__(self) -> None:
        for field, known in (("draft", DRAFTS), ("lanes", LANES)):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in known:
                raise ConfigError(field, value, "one of " + ", ".join(known))
        if type(self.draft_tokens) is not int or not 1 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise ConfigError(
                "draft_tokens", self.draft_tokens, f"a whole number from 1 to {MAX_DRAFT_TOKENS}"
            )
        if self.draft == "off" and self.draft_tokens != 1:
            raise ConfigError("draft_tokens", self.draft_tokens, "nothing with draft off, which guesses none")


@dataclass(frozen=True)
class MulticastGroup:
    """Where requests go by multicast.

    Args:
        group: IPv4 address of the group.
        port: UDP port.
        interface: Address of this host whose interface they leave by; None for that of the connections.
    """

    group: str
    port: int
    interface: str | None


def parse_multicast(text: object) -> MulticastGroup | None:
    """The group that ``text`` spells, ``"239.77.0.1:7400"`` or with ``"@192.168.1.2"``; None for ``"off"``.

    Raises:
        ConfigError: It spells none.
    """
    if text == "off":
        return None
    match = _GROUP.fullmatch(text) if isinstance(text, str) else None
    try:
        group = ipaddress.IPv4Address(match[1] if match else "")
        interface = None if match is None or match[3] is None else str(ipaddress.IPv4Address(match[3]))
        port = int(match[2]) if match else 0
    except ValueError:
        port = 0
    if not 1 <= port <= 65535 or not group.is_multicast:
        raise ConfigError("multicast", text, "off, or an IPv4 group: 239.77.0.1:7400, or with @INTERFACE")
    if group in _OF_THE_NETWORK:
        raise ConfigError("multicast", text, "a group outside 224.0.0.0/24, which is the network's own")
    return MulticastGroup(str(group), port, interface)


def is_utf8(text: str) -> bool:
    """Whether ``text`` can be encoded: bytes of the environment that are not UTF-8 arrive as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def parse_whole(text: str) -> int | None:
    """The whole number that a user wrote, digits of ASCII and spaces around them; None where it is none."""
    text = text.strip()
    return int(text) if _WHOLE.fullmatch(text) else None


def parse_decimal(text: str) -> float | None:
    """Likewise a number that may have a fraction, ``"1.5"`` or ``"2e3"``."""
    text = text.strip()
    return float(text) if _DECIMAL.fullmatch(text) else None


def parse_size(field: str, text: str) -> int:
    """Bytes from a size: ``"2GiB"``, ``"800MB"``, ``"1.5G"`` (a GiB and a half) or a number of bytes.

    Raises:
        ConfigError: ``text`` is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(field, text, "a size: 2GiB, 800MB or a number of bytes")
    number, unit = match[1], (match[2] or "").upper()
    base = 1000 if len(unit) == 2 else 1024
    return int(float(number) * base ** " KMGT".index(unit[:1] or " "))


def as_size(field: str, value: object) -> object:
    """The bytes of a size that is text (:func:`parse_size`); anything else as it is, for others to check.

    Raises:
        ConfigError: A text that is no size.
    """
    return parse_size(field, value) if isinstance(value, str) else value


def show_size(num_bytes: int, *, up: bool = False) -> InWords:
    """``"2.00 GiB"``, ``"12.50 MiB"``, ``"3.00 KiB"`` or ``"80 bytes"``: bytes for people.

    Args:
        num_bytes: What to show.
        up: Never less than it is: for what must be given at least.
    """
    if num_bytes >= 1 << 70:  # no machine's, and perhaps of too many digits
        return InWords("2^70 bytes or more")
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            hundredths = (100 * num_bytes + (unit - 1 if up else unit // 2)) // unit
            return InWords(f"{hundredths // 100}.{hundredths % 100:02d} {name}")
    return InWords(f"{num_bytes} bytes")


def available_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0))


def total_memory_bytes() -> int:
    """Bytes of memory that this machine has in all."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def count_of(count: int, what: str) -> str:
    """A number and what it counts: ``"1 reply"``, ``"2 replies"``."""
    plural = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{count} {what if count == 1 else plural}"


def threads_in_words(count: int) -> str:
    """``"1 thread"``, ``"2 threads"``."""
    return count_of(count, "thread")


def words_on_turns(field: str, threads: int) -> str:
    """What is to be said of threads that take turns on this machine's cores; empty where each has its own."""
    cores = available_cores()
    if threads <= cores:
        return ""
    return f"{field}: {threads_in_words(threads)} take turns on {count_of(cores, 'core')}, which is slower"
