"""Experiments, their records, and the tables made of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from orthoconv import models
from orthoconv.data import load
from orthoconv.lab.cli import main
from orthoconv.lab.configs import Training, digest
from orthoconv.lab.paper.experiment import Experiment, experiments_folder, load_experiment, names
from orthoconv.lab.paper.pages import write_pages
from orthoconv.lab.paper.rates import best_rates
from orthoconv.lab.paper.records import metrics_of, read_records
from orthoconv.lab.paper.runners import Context
from orthoconv.lab.paper.tables import Cell, make_table, markdown, records_of
from orthoconv.lab.runs import Run
from orthoconv.models import trained
from orthoconv.nn import conv_methods
from orthoconv.train import CheckpointError

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
NAMES = names()


def test_every_table_and_figure_has_a_file() -> None:
    assert len(NAMES) == 14
    for name in NAMES:
        text = (experiments_folder() / f"{name}.yaml").read_text()
        opening = text[: text.index("\ntitle:")]
        assert re.match(r"# \d+\. ", opening)
        assert f"orthoconv reproduce {name}" in opening
        assert "Cost" in opening
        assert "CPU cores" in opening or "kwlarge_provable" in opening


@pytest.mark.parametrize("name", NAMES)
def test_every_budget_resolves(name: str) -> None:
    experiment = load_experiment(name)
    assert {"smoke", "short", "paper"} <= set(experiment.budgets)
    for budget in experiment.budgets:
        cases = experiment.cases(budget)
        assert cases
        assert len({case.hash for case in cases}) == len(cases), "each run is another one"
        table = make_table(experiment, budget, [])
        assert "missing" in markdown(table)
    known = {(row.key, column) for row in make_table(experiment, "paper", []).rows for column in table.columns}
    told = {(key, column) for column, cells in experiment.paper.items() for key in cells}
    assert told <= known, "each figure of the paper has a place"


def test_the_paper_is_quoted_right() -> None:
    """A few figures, typed from the paper once more."""
    provable, residual = load_experiment("kwlarge_provable"), load_experiment("residual_empirical")
    assert provable.paper["Cayley"]["certified"] == [59.16, 0.36]
    assert provable.paper["SVCM"]["empirical_lipschitz"] == [0.570, 0.02]
    assert residual.paper["ResNet9 RKO"]["autoattack"] == [71.01, 0.13]
    assert load_experiment("baselines").paper["ResNet9 plain"]["clean"] == [89.22, 0.18]
    assert load_experiment("runtimes").paper["bcop"]["kwlarge 3"] == [round(135.95 / 32.30, 2)]
    assert load_experiment("wasserstein").paper["OSSN"]["distance"] == [7.50]


# Records


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """The records of the repository."""
    return read_records(RESULTS)


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_what_the_records_say(name: str, records: list[dict[str, Any]]) -> None:
    """No figure was written by hand: each table in results is made again from the records."""
    experiment = load_experiment(name)
    path = RESULTS / f"{name}.md"
    made = {budget: make_table(experiment, budget, records) for budget in experiment.budgets}
    ours = [cell.ours for budget in experiment.budgets[1:] for cell in made[budget].cells.values()]
    assert path.exists() or not any(ours)
    text = path.read_text() if path.exists() else ""
    tables = re.findall(r"^\|.*?(?=\n\n|\n?\Z)", text, flags=re.M | re.S)
    mostly_there = []
    for budget, table in zip(re.findall(r"^## Budget (\w+)", text, flags=re.M), tables, strict=True):
        assert table == markdown(made[budget])
        cells = made[budget].cells.values()
        mostly_there += [table] * (2 * sum(bool(cell.ours) for cell in cells) > len(cells))
    for table in mostly_there[-1:]:  # the one of the largest budget is in the documentation
        assert table in (ROOT / "docs" / "reproducing.md").read_text()


def test_records_are_complete(records: list[dict[str, Any]]) -> None:
    for record in records:
        assert {"config", "hash", "seed", "hardware", "seconds"} <= set(record)
        said = r"\+" if record.get("changed") else ""  # a state that was not committed says what was changed in it
        assert re.fullmatch(rf"[0-9a-f]{{40}}{said}", record["hardware"]["commit"]), "made by a committed state"
        assert record["hardware"]["torch"]
        assert "metrics" in record or "evaluation" in record
        if "epochs" in record and "evaluation" in record:  # what the run found, and what its evaluation found
            members = record["config"]["model"].get("members", 1)
            assert record["epochs"][-1]["epoch"] == members * record["config"]["recipe"]["epochs"]
            assert record["epochs"][-1]["test_accuracy"] == pytest.approx(record["evaluation"]["clean"], abs=2e-4)


@pytest.mark.parametrize("name", ["kwlarge_provable", "residual_empirical", "baselines", "methods"])
def test_rates_of_the_experiment_are_the_best_that_were_tried(name: str, records: list[dict[str, Any]]) -> None:
    experiment = load_experiment(name)
    best = best_rates(name, records)
    assert best
    for case in experiment.cases("short"):
        if case.series in best:
            assert case.config["recipe"]["lr"] == best[case.series], case.series


# Running


def call(*args: str) -> None:
    main(list(args))


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_orthogonality_in_small(here, capsys) -> None:
    call("reproduce", "orthogonality", "--budget", "smoke")
    out = capsys.readouterr().out
    assert "missing" not in out
    (record, _) = read_records(here / "runs" / "smoke")
    ratio = record["metrics"]["128 -> 32"]
    assert 0 < ratio["after_min"] <= ratio["after_max"] <= 1 + 1e-5
    page = (here / "runs" / "smoke" / "orthogonality.html").read_text()
    assert page.count("<svg") == 1
    assert record["hash"] in page


@pytest.mark.slow
def test_runs_once_and_resumes(here, capsys) -> None:
    pytest.importorskip("pyautoattack")
    call("reproduce", "eps0", "--budget", "smoke")
    first = read_records(here / "runs" / "smoke")
    assert [r["x"] for r in first] == [0.25, 0.5]
    assert all(r["experiment"] == "eps0" and r["seconds"] > 0 for r in first)
    assert metrics_of(first[0])["clean"] == 100 * first[0]["evaluation"]["clean"]
    capsys.readouterr()
    call("reproduce", "eps0", "--budget", "smoke")
    assert read_records(here / "runs" / "smoke") == first
    out = capsys.readouterr().out
    assert "epoch" not in out
    assert f"| eps0 = 0.25, Clean | {100 * first[0]['evaluation']['clean']:.2f} |" in out

    (here / "runs" / "smoke" / "eps0.jsonl").unlink()  # the runs are still there: only their evaluation is missing
    call("reproduce", "eps0", "--budget", "smoke")
    again = read_records(here / "runs" / "smoke")
    assert "epoch" not in capsys.readouterr().out
    assert [r["metrics"] for r in again] == [r["metrics"] for r in first]


@pytest.mark.slow
def test_methods_in_small(here, capsys) -> None:
    """One column of the comparison, at an eighth of the channels."""
    pytest.importorskip("pyautoattack")
    experiment = load_experiment("methods")
    case = next(c for c in experiment.cases("smoke") if c.series == "KWLarge aol")
    config = json.loads(json.dumps(case.config))
    config["model"]["width"] = 0.125
    record = experiment.runner.execute(config, Context(here / "runs", None, case.evaluation))
    figures = record["metrics"]
    assert {row.key for row in experiment.rows} <= figures.keys()
    assert 0 <= figures["smallest"] <= figures["largest"] <= 1 + 1e-5
    assert figures["broken"] == 0
    assert figures["ratio"] < 1
    assert figures["step"] > 0
    assert figures["memory"] > 1
    assert 100 >= figures["clean"] >= figures["certified_36"] >= figures["certified_72"] >= figures["certified_108"]
    assert experiment.runner.is_done(record, case.evaluation)
    assert not experiment.runner.is_done(record, {**case.evaluation, "examine": 100})
    made = {**record, "config": case.config}
    table = make_table(experiment, "smoke", [made])
    line = next(line for line in markdown(table).splitlines() if line.startswith("| KWLarge aol |"))
    assert line.startswith(f"| KWLarge aol | {figures['clean']:.2f} | ")
    assert "missing" not in line
    assert "none" not in line
    assert markdown(table).count("missing") == (len(table.columns) - 1) * len(table.rows)
    block = {**made, "metrics": {k: v for k, v in record["metrics"].items() if k != "smallest"}}
    (line,) = (line for line in markdown(make_table(experiment, "smoke", [block])).splitlines() if "aol" in line[:13])
    assert line.count("none") == 1
    (here / "methods.jsonl").write_text(json.dumps({**made, "hash": case.hash}) + "\n")
    page = write_pages(experiment, here, smoke=True).read_text()
    assert page.count("<svg") == 1
    assert "<th>Certified 36/255</th>" in page
    other = next(c for c in load_experiment("kwlarge_provable").cases("smoke") if c.series == "Cayley")
    assert not load_experiment("kwlarge_provable").runner.is_done(made, other.evaluation), "it was not attacked"


def test_a_series_stands_for_every_method() -> None:
    experiment = load_experiment("methods")
    assert experiment.columns == [f"{network} {m}" for network in ("KWLarge", "LipConvNet") for m in conv_methods()]
    cases = {case.series: case.config for case in experiment.cases("short")}
    assert cases["LipConvNet lot"]["model"]["conv"] == "lot"
    assert {c["recipe"]["loss"] for c in cases.values()} == {"offset_cross_entropy"}
    assert {c["model"]["head"] for c in cases.values()} == {"normalized"}
    fields = {
        "title": "",
        "place": "",
        "runner": "train",
        "rows": [],
        "budgets": {"short": {}},
        "base": {"data": "digits"},
    }
    series = {"{method}": {"model": {"conv": "{method}"}}, "bcop": {"recipe": {"lr": 0.5}}}
    mixed = {case.series: case.config for case in Experiment("x", {**fields, "series": series}).cases("short")}
    assert mixed["bcop"]["model"]["conv"] == "bcop"
    assert mixed["bcop"]["recipe"]["lr"] == 0.5
    assert mixed["aol"]["recipe"]["lr"] == 0.01


@pytest.mark.slow
def test_wasserstein_in_small(here, capsys) -> None:
    call("reproduce", "wasserstein", "--budget", "smoke", "--only", "[Cayley, RKO]")
    assert [line.count("missing") for line in capsys.readouterr().out.splitlines() if line.startswith("| Dist")] == [
        2,
        0,
    ]
    options = ("--width", "0.0625", "--steps", "2", "--rates", "[0.01]", "--examples", "32")
    call("wasserstein", "--data", "digits32", "--other", "shift", *options)
    assert "the distance is 5.0000" in capsys.readouterr().out


@pytest.mark.slow
def test_rates(here, capsys) -> None:
    options = ("--data", "digits32", "--examples", "256", "--only", "[Cayley]", "--grid", "[0.001, 0.01]")
    call("rates", "kwlarge_provable", *options)
    records = read_records(here / "results")
    assert [r["config"]["recipe"]["lr"] for r in records] == [0.001, 0.01]
    by_rate = {r["config"]["recipe"]["lr"]: r["metrics"]["accuracy"] for r in records}
    best = best_rates("kwlarge_provable", records)["Cayley"]
    assert by_rate[best] == max(by_rate.values())
    assert f"best for Cayley: {best:g}" in capsys.readouterr().out
    call("rates", "kwlarge_provable", *options)
    assert read_records(here / "results") == records


@pytest.mark.parametrize(
    "whole", [pytest.param(False, marks=pytest.mark.slow, id="first"), pytest.param(True, marks=pytest.mark.long)]
)
def test_smoke_of_everything(whole: bool, here, capsys) -> None:
    """The first series of each experiment, or all of them."""
    pytest.importorskip("pyautoattack")
    for name in NAMES:
        cases = load_experiment(name).cases("smoke")
        series = list(dict.fromkeys(case.series for case in cases))[: None if whole else 1]
        if name == "methods":  # tests/test_every_method.py has the others
            series = ["KWLarge lot", "LipConvNet cpl"] if whole else ["KWLarge lot"]
        call("reproduce", name, "--budget", "smoke", "--only", f"[{', '.join(series)}]")
        records = read_records(here / "runs" / "smoke")
        if name in {"runtimes", "runtime_panels"}:  # which time less in small
            continue
        for case in cases:
            if case.series in series:
                assert records_of(case, load_experiment(name), records), f"{name}: {case.series}"
        if whole and name != "methods":
            table = make_table(load_experiment(name), "smoke", records)
            assert all(cell.ours for cell in table.cells.values()), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "the experiments are orthogonality, .* got 'nothing'"),
        (["eps0", "--only", "[BCOP]"], "eps0 has the columns Cayley; got 'BCOP'"),
    ],
)
def test_refusals(here, arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        call("reproduce", *arguments)


def test_bad_files(here) -> None:
    with pytest.raises(ValueError, match=r"x.yaml has the field 'tilte'"):
        Experiment("x", {"tilte": 1})
    with pytest.raises(ValueError, match=r"x.yaml lacks the field 'budgets'"):
        Experiment("x", {"title": "", "place": "", "runner": "train", "rows": []})
    with pytest.raises(ValueError, match=r"runner must be one of train, .* got 'guess'"):
        Experiment("x", {"title": "", "place": "", "runner": "guess", "rows": [], "budgets": {}})
    (here / "a.jsonl").write_text('{"config": {}}\nnonsense\n')
    with pytest.raises(ValueError, match=r"a.jsonl, line 2 is not a record"):
        read_records(here)
    with pytest.raises(SystemExit, match="runtimes has no columns that a learning rate is chosen for"):
        call("rates", "runtimes")


# Tables


def test_cells() -> None:
    assert Cell([], [1.0]).our_text(2) == "missing"
    assert Cell([], [1.0], made=True).our_text(2) == "none"
    assert Cell([1.0], []).our_text(2) == "1.00"
    assert Cell([1.0, 3.0], []).our_text(1) == "2.0 ± 1.4 (n = 2)"
    assert Cell([], [75.33, 0.41]).paper_text(2) == "75.33 ± 0.41"
    assert Cell([], []).paper_text(2) == ""


def test_records_match_by_what_was_run_alone() -> None:
    """Not by the name of the experiment; a changed field makes another run, a new field with its default does not."""
    experiment = load_experiment("kwlarge_provable")
    case = next(c for c in experiment.cases("short") if c.series == "Cayley")
    evaluation = {"attacked": 1000, "examples": 10_000, "eps": 36 / 255, "apgd_iterations": 100}
    record = json.loads(json.dumps({"config": {**case.config, "data_dir": None}, "evaluation": evaluation}))
    assert records_of(case, experiment, [record]) == [record]
    old = json.loads(json.dumps(record))
    del old["config"]["examples"], old["config"]["recipe"]["project_every"]
    assert records_of(case, experiment, [old]) == [old]
    other = json.loads(json.dumps(record))
    other["config"]["recipe"]["lr"] = 0.5
    assert records_of(case, experiment, [other]) == []
    for weaker in ({"attacked": 10}, {"eps": 0.5}, {"apgd_iterations": 10}):
        assert records_of(case, experiment, [{**record, "evaluation": {**evaluation, **weaker}}]) == []
    full = {**record, "evaluation": {**evaluation, "attacked": 10_000}}
    assert records_of(case, experiment, [full, record])[-1] is full
    others = load_experiment("lipschitz_tradeoff").cases("short")
    assert case.hash in {c.hash for c in others if c.x == 1}, "the same run, whichever table asks for it"
    assert digest({"a": 1}) != digest({"a": 2})


# Networks that come with the package


def test_pretrained_is_what_its_card_says() -> None:
    assert models.PRETRAINED
    for name in models.PRETRAINED:
        model, about = models.pretrained(name), models.card(name)
        assert not model.training
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
        assert about["figures"]["clean"] > 0.7
        assert f'models.pretrained("{name}")' in (ROOT / "docs" / "cards" / f"{name}.md").read_text()
    with pytest.raises(ValueError, match=r"name must be one of .*, got 'vgg'"):
        models.pretrained("vgg")


@pytest.mark.slow
def test_publish(here, capsys, monkeypatch) -> None:
    """A run is published with its card; what is loaded is what was trained, and no other file is taken."""
    pytest.importorskip("pyautoattack")
    options = ("--recipe.epochs", "1", "--recipe.augment", "false", "--model.width", "0.25")
    call("train", "--out", "run", *options)
    with pytest.raises(SystemExit, match="run has no evaluation; run: orthoconv evaluate run"):
        call("publish", "run", "small")
    call("evaluate", "run", "--attack_examples", "20", "--apgd_iterations", "3")
    call("publish", "run", "small", "--out", "out")
    digest = re.search(r"SHA-256 of the weights: (\w{64})", capsys.readouterr().out).group(1)
    card = (here / "out" / "small.md").read_text()
    evaluation = json.loads((here / "run" / "evaluation.json").read_text())
    assert f"| clean accuracy | {100 * evaluation['clean']:.2f} % of 500 test images |" in card
    assert digest in card

    monkeypatch.setattr(trained, "_path", lambda name: here / "out" / f"{name}.safetensors")
    monkeypatch.setitem(models.PRETRAINED, "small", digest)
    _, test = load("digits")
    model = models.pretrained("small")
    original = Run(here / "run").load_model()
    assert torch.equal(model(test.images), original(test.images))
    assert models.card("small")["figures"]["clean"] == evaluation["clean"]
    monkeypatch.setitem(models.PRETRAINED, "small", "0" * 64)
    with pytest.raises(CheckpointError, match=f"has weights with the SHA-256 {digest}, not 000"):
        models.pretrained("small")
    path = here / "out" / "small.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"small.safetensors is damaged"):
        models.pretrained("small")


# One digest identifies a configuration


def test_records_folders_and_cards_agree_on_a_digest(records: list[dict[str, Any]]) -> None:
    """Each record stores the digest of its complete configuration, and the card of a network that of its record."""
    hashes = set()
    for record in records:
        if "data" in record["config"] and "layers" not in record["config"]:
            assert record["hash"] == Training.of(record["config"]).hash, record["config"]
            hashes |= {record["hash"]} if "evaluation" in record else set()
    assert len(hashes) >= 15
    for name in models.PRETRAINED:
        card = models.card(name)
        assert card["hash"] in hashes
        assert card["hash"] in (ROOT / "docs" / "cards" / f"{name}.md").read_text()


def test_constants_of_another_loss_do_not_change_a_digest() -> None:
    """The digest of the defaults is that of the version that had no offset and no head."""
    plain = Training.of({"data": "digits"})
    assert plain.hash == "cfdd424a630e3ac8"
    assert Training.of({"data": "digits", "recipe": {"offset": 0.7, "temperature": 1.0}}).hash == plain.hash
    used = [{"loss": "offset_cross_entropy"}, {"loss": "offset_cross_entropy", "offset": 0.7}]
    hashes = {Training.of({"data": "digits", "recipe": recipe}).hash for recipe in used}
    head = Training.of({"data": "digits", "model": {"head": "normalized"}})
    assert len(hashes | {plain.hash, head.hash}) == 4
    assert "head" not in plain.config["model"]
    assert head.config["model"]["head"] == "normalized"


def test_the_margin_is_that_of_the_network_s_own_bound() -> None:
    """Unless the recipe has another; what is stored is a number, so that old records stay matched."""
    half = Training.of({"data": "digits", "model": {"lipschitz": 0.5}})
    assert half.recipe.lipschitz == half.config["recipe"]["lipschitz"] == 0.5
    other = {"data": "digits", "model": {"lipschitz": 0.5}, "recipe": {"lipschitz": 2.0}}
    assert Training.of(other).config["recipe"]["lipschitz"] == 2.0
    explicit = Training.of({"data": "digits", "recipe": {"lipschitz": 1.0}})
    assert explicit.hash == Training.of({"data": "digits"}).hash
