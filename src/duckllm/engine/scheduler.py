"""Which tokens of which requests the next step computes.

Called by the engine. Every request has tokens of which some are computed; a step computes some of the rest.
Requests that only their last token is missing of, those that are answering, come first: a long prompt makes
them wait for one step's worth of it, never for all. What room is left goes to prompts in the order they came;
one that begins as another does that is being computed waits for that beginning, and then takes it over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from duckllm.engine.kv_cache import PAGE_TOKENS, KvCache, PageTable
from duckllm.engine.request import Request
from duckllm.outputs import CachedTokens


@dataclass(frozen=True)
class Scheduled:
    """Tokens [start, stop) of a request, which the step computes, and guesses at what follows them."""

    request: Request
    table: PageTable
    start: int
    stop: int
    drafts: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """What is computed."""
        return [*self.request.token_ids[self.start : self.stop], *self.drafts]

    @property
    def ends(self) -> bool:
        """Whether they are the last ones that the request has, so that the next one can be sampled."""
        return self.stop == len(self.request.token_ids)


class Scheduler:
    """Requests that wait for room and requests that have some.

    Args:
        kv_cache: The room.
        max_step_tokens: Most tokens of one step.
        max_num_seqs: Most requests that are computed at a time.
        max_drafts: Most guesses of a request; 0 where nobody guesses.
    """

    def __init__(
        self, kv_cache: KvCache, max_step_tokens: int, max_num_seqs: int, max_drafts: int = 0
    ) -> None:
        self.kv_cache = kv_cache
        self.max_step_tokens, self.max_num_seqs, self.max_drafts = max_step_tokens, max_num_seqs, max_drafts
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, PageTable] = {}  # in the order they came
        # The one that waits for its beginning to come up from the tiers, and who would do so too meanwhile.
        self._fetching: tuple[Request, PageTable] | None = None
        self._passed: set[Request] = set()
        # Who waits for a running one to compute the beginning that both have, so many tokens.
        self._follows: dict[Request, tuple[Request, int]] = {}
        self._num_steps = 0
        # Of the running ones, in which step they were computed last, and at which place in it.
        self._last_turn: dict[Request, tuple[int, int]] = {}
        self._is_changing = False

    def __contains__(self, request: Request) -> bool:
        return request in self._running or request in self._waiting

    @property
    def num_running(self) -> int:
        """Requests that are computed. Any thread may ask."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room. Any thread may ask."""
        return len(self._waiting)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around every change of who has which pages.

        An exception inside, KeyboardInterrupt among them, may leave requests and pages at odds. Then the next
        change begins with an empty cache, and every request is computed anew.
        """
        if self._is_changing:
            self.kv_cache.clear()
            for request in self._running:
                request.num_computed_tokens = 0
            running = [request for request in self._running if request not in self._waiting]
            self._waiting.extendleft(reversed(running))
            self._running.clear()
            self._fetching = None
            self._passed.clear()
            self._follows.clear()
            self._last_turn.clear()
        self._is_changing = True
        yield
        self._is_changing = False

    def add(self, request: Request) -> None:
        """Takes a request in, unless it is there; it is computed when it is its turn."""
        if request not in self:
            self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Lets go of a request and of its pages; harmless where it is not there."""
        if request in self:
            with self._changing():
                if request in self._running:
                    self._let_go(request)
                else:
                    self._waiting.remove(request)
                    self._passed.discard(request)
                    self._follows.pop(request, None)
                    if self._fetching is not None and self._fetching[0] is request:
                        self._stop_fetching()

    def finish(self, scheduled: Scheduled, num_sealed_tokens: int) -> None:
        """Makes known to others what is whole of the first tokens; lets go of a request that has ended."""
        request = scheduled.request
        with self._changing():
            self.kv_cache.seal(scheduled.table, request.token_ids, num_sealed_tokens)
            if request.finish_reason is not None:
                self._let_go(request)

    def _let_go(self, request: Request) -> None:
        self.kv_cache.close(self._running.pop(request))
        self._last_turn.pop(request, None)
        request.num_computed_tokens = 0

    def schedule(self) -> list[Scheduled]:
        """The next step, empty where nobody waits. One that was not computed is asked for again."""
        while True:
            with self._changing():
                step = self._schedule()
            if step or self._fetching is None:
                return step
            self.kv_cache.wait_for(self._fetching[1])

    def _schedule(self) -> list[Scheduled]:
        step: list[Scheduled] = []
        budget = self.max_step_tokens
        preempted = False
        for request in [request for request in self._running if request.finish_reason is not None]:
            self._let_go(request)  # its last step was interrupted
        order = sorted(self._running, key=self._turn)
        answering = sum(_num_left(request) == 1 for request in order)
        # Guesses take no answering one's turn, and half of what is left then where there are prompts.
        has_prompts = answering < len(order) or (self._waiting and len(order) < self.max_num_seqs)
        room = max(0, budget - answering) // (2 if has_prompts else 1)
        # However many answer, prompts come forward: by an eighth of each step, or in each fourth one.
        kept = (budget // 8 or int(self._num_steps % 4 == 0)) if has_prompts else 0
        for number, request in enumerate(order):
            is_late = number < answering and budget <= kept  # its turn is in the next step
            if not budget or is_late or request not in self._running:
                continue
            most_drafts = -(-room // max(1, answering - number))
            wanted = _wanted(request, self._running[request], budget, most_drafts)
            room -= len(wanted.drafts)
            preempted |= not self._make_room(wanted, step)
            if request in self._running:
                step.append(wanted)
                budget -= len(wanted.token_ids)
        for request in () if preempted else tuple(self._waiting):
            if not budget or len(self._running) == self.max_num_seqs:
                break
            table = None if self._is_behind(request) else self._table_of(request)
            if table is None:
                continue
            if self._follow(request, table):
                self.kv_cache.close(table)
                continue
            num_cached = len(table.pages) * PAGE_TOKENS
            # A guess is made from the hidden state of the token before, which is in no cache.
            request.num_computed_tokens = num_cached - 1 if num_cached and self.max_drafts else num_cached
            wanted = _wanted(request, table, budget, budget)
            if not self._take_room(wanted):
                self.kv_cache.close(table)
                break
            self._waiting.remove(request)
            self._running[request] = table
            if request.cached_tokens is None:
                request.cached_tokens = _cached_tokens(table)
            step.append(wanted)
            budget -= len(wanted.token_ids)
        self._num_steps += 1
        self._last_turn |= {each.request: (self._num_steps, place) for place, each in enumerate(step)}
        return step

    def _turn(self, request: Request) -> tuple[bool, tuple[int, int]]:
        """Where a request stands: who answers first, of those who was passed over longest."""
        is_prompt = _num_left(request) > 1
        return is_prompt, (0, 0) if is_prompt else self._last_turn.get(request, (0, 0))

    def _room(self, wanted: Scheduled) -> int:
        """Tokens that need pages: what is computed, and as many guesses in it and behind it as may be."""
        return min(wanted.stop + 2 * self.max_drafts, wanted.request.max_model_len)

    def _follow(self, request: Request, table: PageTable) -> bool:
        """Whether another one is about to compute the next page of this one, which had better wait for it."""
        if request.most_cached_tokens < request.num_prompt_tokens:
            return False  # it could take over nothing
        found = len(table.pages)
        for other, others_table in self._running.items():
            if others_table.hashes[:found][-1:] != table.hashes[-1:]:
                continue
            common = _common_pages(request, other, found) * PAGE_TOKENS
            if found * PAGE_TOKENS < common and other.num_computed_tokens < common:
                self._follows[request] = (other, common)
                return True
        return False

    def _is_behind(self, request: Request) -> bool:
        """Whether what the request waits for is still being computed."""
        if request not in self._follows:
            return False
        other, common = self._follows[request]
        if other in self._running and other.num_computed_tokens < common:
            return True
        del self._follows[request]
        return False

    def _table_of(self, request: Request) -> PageTable | None:
        """A table with all that is known of the request; None while some of that has yet to come up."""
        if self._fetching is not None and self._fetching[0] is request:
            table = self._fetching[1]
        elif request in self._passed:
            return None
        else:
            # One token more than may come from the cache: the last one that is named is left to compute.
            table, _ = self.kv_cache.open(request.token_ids[: request.most_cached_tokens + 1])
            if table.coming and self._fetching is not None:
                table.coming.clear()  # it is not the one that is read for
                self.kv_cache.close(table)
                self._passed.add(request)
                return None
            if not table.coming:
                return table
            self._fetching = (request, table)
        if not self.kv_cache.fetch(table):
            return None
        self._fetching = None
        self._passed.clear()
        return table

    def _stop_fetching(self) -> None:
        """What came up so far is left to whoever needs the room; the request waits as before."""
        assert self._fetching is not None
        self.kv_cache.close(self._fetching[1])
        self._fetching = None
        self._passed.clear()

    def _take_room(self, wanted: Scheduled) -> bool:
        """Pages for one that waits, where there are any; who is read for and comes behind it loses its."""
        while not self.kv_cache.reserve(wanted.table, self._room(wanted)):
            if self._fetching is None:
                return False
            place = self._waiting.index
            if place(self._fetching[0]) < place(wanted.request):
                return False
            self._stop_fetching()
        return True

    def _make_room(self, wanted: Scheduled, step: list[Scheduled]) -> bool:
        """Pages for what is wanted; requests that came last lose theirs. Whether none had to."""
        taken = {scheduled.request for scheduled in step}
        nobody_lost = True
        while not self.kv_cache.reserve(wanted.table, self._room(wanted)):
            nobody_lost = False
            if self._fetching is not None:
                self._stop_fetching()
                continue
            last = next(other for other in reversed(self._running) if other not in taken)
            self._let_go(last)
            self._waiting.appendleft(last)
            if last is wanted.request:
                break
        return nobody_lost


def _num_left(request: Request) -> int:
    """Tokens to compute. A step that was interrupted before it sampled is repeated: there always is one."""
    return max(1, len(request.token_ids) - request.num_computed_tokens)


def _common_pages(request: Request, other: Request, known: int) -> int:
    """Full pages that both begin with, of which so many are known; ``request`` keeps a token to compute."""
    pages = known
    most = min(len(request.token_ids) - 1, len(other.token_ids)) // PAGE_TOKENS
    while pages < most:
        page = slice(pages * PAGE_TOKENS, (pages + 1) * PAGE_TOKENS)
        if request.token_ids[page] != other.token_ids[page]:
            break
        pages += 1
    return pages


def _wanted(request: Request, table: PageTable, budget: int, most_drafts: int) -> Scheduled:
    num_left = _num_left(request)
    start = len(request.token_ids) - num_left
    stop = start + min(budget, num_left)
    is_last = stop == len(request.token_ids)
    drafts = request.draft_token_ids[: min(most_drafts, budget - num_left)] if is_last else []
    return Scheduled(request, table, start, stop, tuple(drafts))


def _cached_tokens(table: PageTable) -> CachedTokens:
    return CachedTokens(**{tier: pages * PAGE_TOKENS for tier, pages in table.found.items()})
