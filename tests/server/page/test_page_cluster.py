"""The cluster view of the page in a browser, against canned answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.cluster_answers import cluster_answer
from support.page_server import PageServer

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route


@pytest.fixture
def view(page: Page, canned: PageServer) -> Page:
    """The cluster view, on a clock of the test's."""
    canned.cluster = cluster_answer()
    page.clock.install()
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator(".workers tbody tr")).to_have_count(2)
    return page


def test_it_says_what_the_server_says(view: Page, canned: PageServer) -> None:
    expect(view.locator("#cluster-model")).to_have_text("demo, fp9, 2 workers, host avx512")
    cells = view.locator(".workers tbody tr").nth(1).locator("> * > :last-child")
    expect(cells).to_have_text(
        ["110.0.0.12:7411", "working", "50 %, 9 stripes", "1.25 GiB fp9", "avx2, 16 threads", "tcp", "301 µs",
         "201 µs", "0"]
    )  # fmt: skip
    expect(view.locator(".tiles > div")).to_have_text(
        [
            "Replies running2",
            "Waiting1",
            "Replies, last steps18.4 tok/s",
            "Prompts, last steps210 tok/s",
            "First token, median · 99 %840 ms · 4.10 s",
            "Between tokens, median · 99 %\N{EN DASH}",
            "Guesses right80 %",
            "Running for60.0 s",
        ]
    )
    step = view.get_by_role("region", name="A step's time")
    expect(step.locator("dl > div")).to_have_text(
        ["attention10.0 ms · 20 %", "waiting for experts30.0 ms · 60 %", "something new10.0 ms · 20 %"]
    )
    shares = step.locator(".stacked span").evaluate_all("(parts) => parts.map((part) => part.clientWidth)")
    assert shares[1] == pytest.approx(3 * shares[0], abs=3)
    expect(view.get_by_role("region", name="Memory of the host").locator("dl > div")).to_have_text(
        ["weights2.00 GiB", "KV cache512 MiB", "something new3 B"]
    )
    # 45 tokens in 1.5 s of the server's clock.
    canned.cluster = cluster_answer(generated=145, uptime_s=61.5)
    view.clock.run_for(1100)
    expect(view.locator(".big")).to_have_text("30.0")
    expect(view.get_by_role("img", name="Tokens per second")).to_have_attribute(
        "aria-label",
        "Tokens per second of the last minute that the page looked: now 30.0, at most 30.0",
    )
    # A server that was started anew while nobody looked.
    canned.cluster = cluster_answer(generated=5, uptime_s=70)
    view.clock.run_for(1100)
    expect(view.locator(".tiles")).to_contain_text("Running for70.0 s")
    expect(view.locator(".big")).to_have_text("30.0")


def test_nodes_by_their_names_and_those_that_wait(view: Page, canned: PageServer) -> None:
    others = view.get_by_role("region", name="Other nodes")
    expect(others).to_have_count(0)
    answer = cluster_answer()
    for number, worker in enumerate(answer["workers"]):
        worker |= {"name": f"duck-{number}", "memory_bytes": 16 << 30, "read_gb_per_s": 35.25}
    answer["other_nodes"] = [
        {
            **{"name": "duck-9", "address": "10.0.0.19:7411", "state": "waiting", "memory_bytes": 8 << 30},
            **{"read_gb_per_s": None, "problem": ""},
        },
        {
            **{"name": "gull-1", "address": "", "state": "refused", "memory_bytes": 0},
            **{"read_gb_per_s": None, "problem": "another token"},
        },
    ]
    canned.cluster = answer
    view.clock.run_for(1100)
    cells = view.locator(".workers tbody tr").nth(1).locator("> * > :last-child")
    expect(cells.nth(0)).to_have_text("1duck-1, 10.0.0.12:7411")
    expect(cells.nth(4)).to_have_text("avx2, 16 threads, 16.0 GiB, 35.3 GB/s")
    expect(others.locator("dl > div")).to_have_text(
        [
            "duck-9, 10.0.0.19:7411waits for a lost one's place, 8.00 GiB",
            "gull-1is not taken in: another token",
        ]
    )
    # One name for several says nothing.
    for worker in answer["workers"]:
        worker["name"] = "swan"
    view.clock.run_for(1100)
    expect(cells.nth(0)).to_have_text("110.0.0.12:7411")


def test_a_worker_that_is_lost_is_seen_and_so_is_its_return(view: Page, canned: PageServer) -> None:
    row = view.locator(".workers tbody tr").nth(1)
    alert = view.get_by_role("alert")
    expect(alert).to_have_count(0)
    canned.cluster = cluster_answer(lost=[1])
    view.clock.run_for(1100)
    expect(alert).to_have_text("Worker 1 (10.0.0.12:7411) lost. Replies wait until it is back or replaced.")
    expect(row).to_have_class("lost")
    expect(row.locator(".state")).to_have_text("lost")
    expect(view.locator(".events li")).to_contain_text(["Worker 1 (10.0.0.12:7411) is lost"])
    back = cluster_answer()
    back["workers"][1] |= {"num_losses": 1, "address": "10.0.0.19:7411"}
    canned.cluster = back
    view.clock.run_for(1100)
    expect(alert).to_have_count(0)
    expect(row.locator(".state")).to_have_text("back again")
    expect(view.locator(".events li")).to_contain_text(
        ["Worker 1 is back, now at 10.0.0.19:7411", "Worker 1 (10.0.0.12:7411) is lost"]
    )
    expect(view.locator("#said")).to_contain_text("Worker 1 is back, now at 10.0.0.19:7411")
    view.clock.run_for(16_000)
    expect(row.locator(".state")).to_have_text("working")
    # Between two looks.
    back["workers"][0] |= {"num_losses": 3}
    view.clock.run_for(1100)
    expect(view.locator(".events li").first).to_contain_text("Worker 0 was lost and is back")


def test_the_heat_map_is_read_with_keys_pointer_and_as_a_table(view: Page, canned: PageServer) -> None:
    canned.cluster = cluster_answer(workers=32, layers=61, lost=[5])
    view.clock.run_for(1100)
    canvas = view.get_by_role("application", name="Compute time by layer and worker")
    expect(view.locator("#heat-summary")).to_have_text(
        "Median 3.12 ms; slowest 6.13 ms, layer 61 on worker 31."
    )
    expect(view.locator(".ramp > span")).to_have_text(["≤ 119 µs", "≥ 6.11 ms"])
    value = view.locator(".heat-value")
    canvas.focus()
    expect(value).to_have_text("Layer 1, worker 0 (10.0.0.11:7411): 100 µs; this layer's median 116 µs")
    view.keyboard.press("ArrowRight")
    view.keyboard.press("ArrowDown")
    expect(value).to_contain_text("Layer 2, worker 1 (10.0.0.12:7411): 201 µs")
    view.clock.run_for(300)
    expect(view.locator("#said")).to_contain_text("Layer 2, worker 1 (10.0.0.12:7411): 201 µs")
    view.keyboard.press("End")
    for _ in range(4):
        view.keyboard.press("ArrowDown")
    expect(value).to_have_text("Layer 61, worker 5 (10.0.0.16:7411): lost")
    # 61 x 32 values in the space there is, each to be seen and to be pointed at.
    box = canvas.bounding_box()
    assert box is not None
    cell = [(box["width"] - 46) / 61, (box["height"] - 20) / 32]
    assert min(cell) >= 12
    canvas.hover(position={"x": 46 + 20.5 * cell[0], "y": 20 + 10.5 * cell[1]})
    expect(value).to_contain_text("Layer 21, worker 10 (10.0.0.21:7411): 2.11 ms")
    view.set_viewport_size({"width": 390, "height": 844})
    narrow = canvas.bounding_box()
    assert narrow is not None
    cell = [(narrow["width"] - 46) / 32, (narrow["height"] - 20) / 61]
    assert min(cell) >= 8
    assert narrow["x"] + narrow["width"] <= 390
    canvas.hover(position={"x": 46 + 10.5 * cell[0], "y": 20 + 20.5 * cell[1]})
    expect(value).to_contain_text("Layer 21, worker 10 (10.0.0.21:7411): 2.11 ms")
    view.get_by_text("The values as a table").click()
    cells = view.locator(".heat tbody tr").nth(20).locator("td")
    expect(cells).to_have_text([str(2100 + index) for index in range(32)])


def test_slow_cells_are_drawn_otherwise_than_fast_ones(view: Page, canned: PageServer) -> None:
    answer = cluster_answer(workers=2, layers=4)
    answer["compute_us"] = [[100.0, 500.0], [100.0, 500.0], [100.0, None], [100.0, 500.0]]
    canned.cluster = answer
    view.clock.run_for(1100)
    expect(view.locator("#heat-summary")).to_contain_text("slowest 500 µs")
    pixels = view.locator(".heat > canvas").evaluate(
        """(canvas) => {
          const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
          copy.drawImage(canvas, -46, -20);
          const places = [[10, 5], [10, 30], [50, 5], [90, 30]];
          return places.map(([x, y]) => copy.getImageData(x, y, 1, 1).data.join());
        }"""
    )
    fast, slow, again, missing = pixels
    assert fast == again
    assert len({fast, slow, missing}) == 3


def test_it_asks_each_second_while_it_is_seen_and_less_often_when_there_is_no_answer(
    view: Page, canned: PageServer
) -> None:
    asked: list[str] = []
    view.on("request", lambda request: asked.append(request.url) if "/cluster" in request.url else None)

    def asked_within(seconds: int) -> int:
        asked.clear()
        for _ in range(seconds * 2):  # answers come in the real time between
            view.clock.run_for(500)
            view.wait_for_timeout(10)
        return len(asked)

    assert 4 <= asked_within(6) <= 6
    view.get_by_role("button", name="Pause").click()
    assert asked_within(3) == 0
    view.get_by_role("button", name="Resume").click()
    assert asked_within(3) >= 2
    held: list[Route] = []
    view.route("**/cluster", lambda route: held.append(route))
    view.clock.run_for(1100)
    while not held:
        view.wait_for_timeout(5)
    view.get_by_role("link", name="New chat").click()
    held[0].continue_()  # an answer that comes too late
    assert asked_within(3) == 0
    view.unroute("**/cluster")
    view.route("**/cluster", lambda route: route.abort())
    view.get_by_role("link", name="Cluster").click()
    assert 2 <= asked_within(8) <= 4
    problem = view.locator(".cluster-problem")
    expect(problem).to_contain_text("The server does not answer.")
    expect(problem).to_contain_text("What is below is old.")
    view.unroute("**/cluster")
    asked_within(9)
    expect(problem).to_be_hidden()


def test_experts_in_the_servers_process_are_told(view: Page, canned: PageServer) -> None:
    canned.cluster = cluster_answer(workers=0, layers=0)
    view.clock.run_for(1100)
    expect(view.get_by_role("region", name="Workers")).to_contain_text("in the server's own process")
    expect(view.get_by_role("region", name="Compute time by layer and worker")).to_be_hidden()
