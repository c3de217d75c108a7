"""`orthoconv bench` measures what it says; what it compares with is what it is called. No test asserts a time."""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from orthoconv.lab import benchmark as bench
from orthoconv.lab import machine
from orthoconv.lab.cli import main
from orthoconv.lab.timing import Figures, compare, peak_bytes
from orthoconv.nn import CayleyConv2d, CayleyLinear


class Recorder(nn.Module):
    """Writes its name into a list at each pass."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"{self.name} {'train' if self.training else 'eval'}")
        return x * self.weight


def test_methods_take_turns_after_a_warm_up() -> None:
    log: list[str] = []
    ticks: list[int] = []
    figures = compare({m: Recorder(m, log) for m in "ab"}, torch.ones(3), rounds=4, tick=lambda: ticks.append(1))
    assert log == [  # once for the peak; a warm-up and four rounds; the same in eval mode
        *["a train", "b train"] * (1 + 5),
        *["a eval", "b eval"] * 5,
    ]
    assert len(ticks) == 2 * 2 * 5
    for f in figures.values():
        assert len(f.train) == len(f.evaluate) == 4
        assert min(f.train + f.evaluate) > 0


def test_figures() -> None:
    figures = Figures(train=[3.0, 1.0, 2.0, 4.0, 5.0], evaluate=[1.0, 9.0, 2.0], peak=7)
    assert figures.train_median == 3
    assert figures.evaluate_median == 2
    assert figures.spread == pytest.approx(2 / 3)
    assert Figures([1.0], [1.0], 0).spread == 0


def test_peak_is_what_lives_at_once() -> None:
    def step() -> None:
        a = torch.zeros(1000, 1000)
        b = torch.zeros(1000, 1000)
        del a
        c = torch.zeros(500, 1000)
        del b, c

    assert 8_000_000 <= peak_bytes(step) < 8_100_000


@pytest.mark.parametrize(("i", "o", "k", "n"), [(3, 3, 3, 8), (2, 5, 3, 6), (5, 2, 3, 6), (3, 4, 1, 4), (4, 4, 2, 10)])
def test_the_listing_is_the_paper_s_layer(i: int, o: int, k: int, n: int) -> None:
    listing = bench._listing().ListingConv2d(i, o, k)
    layer = CayleyConv2d(i, o, k)
    layer.load_state_dict({**listing.state_dict(), "g": listing.weight.norm()})
    x = torch.randn(2, i, n, n)
    torch.testing.assert_close(listing(x), layer(x), atol=1e-5, rtol=1e-4)


def test_the_strided_listing_and_its_linear_layer() -> None:
    module = bench._listing()
    for listing, layer, x in [
        (module.ListingConv2d(2, 5, 3, 2), CayleyConv2d(2, 5, 3, 2), torch.randn(2, 2, 8, 8)),
        (module.ListingLinear(7, 3), CayleyLinear(7, 3), torch.randn(2, 7)),
    ]:
        layer.load_state_dict({**listing.state_dict(), "g": listing.weight.norm()})
        torch.testing.assert_close(listing(x), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more", ["", pytest.param(",listing,crko,orthogonium", marks=pytest.mark.slow)])
def test_networks(tmp_path, capsys, more: str) -> None:
    methods = f"[plain,plain conv,cayley{more}]"
    main(["bench", "networks", "--names", "[kwlarge]", "--widths", "[1]", "--batch", "2", "--rounds", "1",
          "--methods", methods, "--out", str(tmp_path)])  # fmt: skip
    out = capsys.readouterr().out
    assert "threads" in out
    assert "kwlarge, width 1, batch 2" in out
    record = json.loads((tmp_path / "networks.json").read_text())
    (case,) = record["cases"]
    assert record["hardware"]["torch"] == torch.__version__
    assert {"plain", "plain conv", "cayley", *(["listing", "crko"] if more else [])} <= set(case["figures"])
    assert all(f["peak"] > 0 and len(f["train"]) == len(f["evaluate"]) == 1 for f in case["figures"].values())
    assert (tmp_path / "networks.png").stat().st_size > 10_000


def test_layers(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(bench.PANELS, "a", ("image size", bench.PANELS["a"][1][:2]))
    main(["bench", "layers", "--panels", "[a]", "--batch", "1", "--rounds", "1",
          "--methods", "[plain,cayley,rko]", "--out", str(tmp_path)])  # fmt: skip
    assert "c 8, o 8, k 3, n 8, batch 1" in capsys.readouterr().out
    record = json.loads((tmp_path / "layers.json").read_text())
    assert [case["panel"] for case in record["cases"]] == ["a"] * 2
    assert (tmp_path / "layers.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["kwlarge", "resnet9", "wide_resnet10_10"])
def test_networks_of_other_libraries_have_no_plain_layer_left(name: str, tmp_path) -> None:
    run = bench.Benchmark("networks", ["plain", "listing", "plain conv"], 1, None, False, tmp_path)
    kinds = [type(m).__name__ for m in run.network("listing", name, 1).modules()]
    assert kinds.count("CircularConv2d") == kinds.count("Linear") == 0
    assert kinds.count("ListingConv2d") >= 4
    kinds = [type(m).__name__ for m in run.network("plain conv", name, 1).modules()]
    assert kinds.count("CircularConv2d") >= 4
    assert kinds.count("Linear") == 0


def test_without_the_other_libraries_their_columns_are_left_out(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(bench, "_listing", lambda: None)
    monkeypatch.setattr(bench, "orthogonium_conv", lambda: None)
    run = bench.Benchmark("layers", None, 1, None, False, tmp_path)
    assert "listing" not in run.methods
    assert "orthogonium" not in run.methods
    out = capsys.readouterr().out
    assert "listing is left out" in out
    assert "pip install orthogonium" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["networks", "--names", "[vgg]"], "vgg"),
        (["networks", "--methods", "[cayley]"], "plain"),
        (["networks", "--methods", "[plain, nosuch]"], "nosuch"),
        (["networks", "--rounds", "0"], "rounds"),
        (["layers", "--panels", "[z]"], "z"),
        (["layers", "--threads", "0"], "threads"),
    ],
)
def test_bad_arguments(args: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["bench", *args])


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_kept_memory_is_not_cleared_again() -> None:
    """Pages that the system hands out, with and without: in one of ten trials, since a busy system reclaims some."""
    code = """
import resource, sys, torch
from orthoconv.allocator import keep_freed_memory
if sys.argv[1] == "keep": assert keep_freed_memory()
for k in range(12):
    if k == 2: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(10**7)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

    def count(mode: str) -> int:
        command = [sys.executable, "-c", code, mode]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    cleared = count("give back")
    assert any(count("keep") < 0.2 * cleared for _ in range(10))


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables(load_script) -> ModuleType:
    return load_script("benchmarks/tables.py")


def test_the_tables_of_the_documentation_are_those_of_the_results(tables: ModuleType, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    found = tables.tables()
    assert len(found) >= 7
    for name, table in found.items():
        assert tables.marked(name, table) in text
    (page := tmp_path / "page.md").write_text(text.replace(found["kwlarge"], "an old table"))
    tables.write(page)
    assert page.read_text() == text


def test_a_table_says_that_its_record_is_older_than_the_code(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = {json.loads(path.read_text()).get("code") for path in tables.RESULTS.glob("*.json")}
    for code in codes - {None}:
        monkeypatch.setattr(tables, "code_digest", lambda code=code: code)
        fresh = {name for name, table in tables.tables().items() if not table.endswith(tables.OLD)}
        assert fresh - {"summary"} == set(tables.tables()) - {"summary"} - set(tables.stale())
    monkeypatch.setattr(tables, "code_digest", lambda: "that of tomorrow")
    assert all(table.endswith(tables.OLD) for table in tables.tables().values())


def test_the_digest_is_of_statements_and_not_of_words() -> None:
    source = 'def f(x):\n    """Double."""\n    return 2 * x\n'
    same = 'def f(x):\n    """Return twice x.\n\n    More.\n    """\n    # twice\n\n    return 2 * x\n'
    assert machine._statements(source) == machine._statements(same)
    assert machine._statements(source) != machine._statements(source.replace("2", "3"))
    assert machine.code_digest() == machine.code_digest()


def test_a_change_of_the_code_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "orthoconv"
    shutil.copytree(ROOT / "orthoconv", package, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    before = machine.code_digest()
    monkeypatch.setattr(machine, "__file__", str(package / "lab" / "machine.py"))
    assert machine.code_digest() == before
    for name in ("linalg/norms.py", "planes.py", "fourier.py", "nn/cayley.py"):
        (package / name).write_text((package / name).read_text() + "changed = 1\n")
        after = machine.code_digest()
        assert after != before
        before = after
    (package / "data" / "names.py").write_text("")
    assert machine.code_digest() == before


def test_every_layer_in_the_results_is_faster_than_the_listing() -> None:
    """But for the smallest one, which the page names: a step of some milliseconds."""
    record = json.loads((ROOT / "results" / "bench" / "layers.json").read_text())
    slower = []
    for case in record["cases"]:
        medians = {name: statistics.median(f["train"]) for name, f in case["figures"].items()}
        if medians["cayley"] >= medians["listing"]:
            slower.append((case["c"], case["o"], case["k"], case["n"], round(1000 * medians["cayley"])))
    ((*layer, milliseconds),) = slower
    assert layer == [8, 8, 3, 4]
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    words = f"In the smallest layer, 8 channels at 4 x 4, a step takes {milliseconds} ms, and the listing is faster."
    assert words in page


@pytest.mark.slow
def test_the_script_for_accelerators_runs_to_its_end(tmp_path: Path) -> None:
    script = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"
    environment = {**os.environ, "QUICK": "1", "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        ["sh", script, "cpu", tmp_path], env=environment, cwd=script.parent.parent, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("device: cpu") == 6
    assert ": verified, 7 layers" in run.stdout
    for name in ("layers.json", "networks.json", "precision=bf16/config.json", "precision=float32/evaluation.json"):
        assert (tmp_path / name).exists()
