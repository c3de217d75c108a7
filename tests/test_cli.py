import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import orthoconv
from orthoconv import __main__, certify, models
from orthoconv.data import DATASETS, load
from orthoconv.lab import cli, evaluation, training
from orthoconv.lab.cli import COMMANDS, main
from orthoconv.lab.commands import verify
from orthoconv.lab.commands.search import search
from orthoconv.lab.parsing import flags_of
from orthoconv.lab.runs import Run
from orthoconv.lab.search import load_trials
from orthoconv.models.trained import build_arguments
from orthoconv.nn import methods


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def call(capsys) -> Callable[..., Result]:
    """Run the command in this process."""

    def run_here(*args: str) -> Result:
        try:
            main(list(args))
            code, message = 0, ""
        except SystemExit as stop:
            message = stop.code if isinstance(stop.code, str) else ""
            code = 1 if message else int(stop.code or 0)
        out, err = capsys.readouterr()
        return Result(code, out, err + message)

    return run_here


def run(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "orthoconv"]
    return subprocess.run([sys.executable, *command, *args], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Folder with two runs on digits that learnt for a moment: `cayley`, which was evaluated too, and `plain`."""
    pytest.importorskip("pyautoattack")
    place = tmp_path_factory.mktemp("trained")
    for conv in ("cayley", "plain"):
        run = ("--out", str(place / conv), "--model.conv", conv, "--model.width", "0.125", "--recipe.epochs", "2")
        run += ("--examples", "640")
        head = ("--model.head", "cayley" if conv == "cayley" else "plain")  # whose bound is 1
        main(["train", "--data", "digits", *run, *head, "--recipe.batch_size", "64", "--recipe.augment", "false"])
    main(["evaluate", str(place / "cayley"), "--attack_examples", "10", "--apgd_iterations", "2"])
    return place


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
    """Folder and output of a short demo."""
    pytest.importorskip("pyautoattack")
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    result = run("demo", "--out", str(out), "--epochs", "3", "--attack_examples", "20", "--apgd_iterations", "5")
    assert result.returncode == 0, result.stderr
    return out, result.stdout


@pytest.mark.slow
def test_demo_prints_its_table_and_its_paths(demo) -> None:
    out, text = demo
    (cayley,) = (line for line in text.splitlines() if line.startswith("cayley  "))
    clean, certified, attacked, pgd, autoattack, empirical, bound = (float(v.rstrip("%")) for v in cayley.split()[1:])
    assert clean > certified > 30
    assert attacked >= max(pgd, autoattack), "of the same images"
    assert empirical <= bound == pytest.approx(1, abs=1e-4)
    assert f"report: {out / 'cayley' / 'report.html'}" in text
    assert "|conv(x)| / |x| = 1.000000" in text
    assert (out / "layer.png").stat().st_size > 50_000


def test_demo_leaves_other_runs_alone(trained, tmp_path, monkeypatch) -> None:
    """It deleted the folders cayley and plain of whatever folder it was given."""
    shutil.copytree(trained, tmp_path / "both")
    shutil.copytree(trained / "plain", tmp_path / "one" / "plain")
    (tmp_path / "one" / "plain" / "config.json").unlink()
    for out in (tmp_path / "both", tmp_path / "one"):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with pytest.raises(SystemExit, match=r"(cayley|plain) has a run that is not of a demo; move it away, or pass"):
            main(["demo", "--out", str(out)])
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before

    monkeypatch.setattr("orthoconv.lab.commands.demo.evaluate_model", lambda *args, **options: sys.exit("trained"))
    train, test = load("digits")
    monkeypatch.setitem(DATASETS, "digits", lambda *_: (train.first(128), test))
    (tmp_path / "demo" / "cayley").mkdir(parents=True)
    (tmp_path / "demo" / "cayley" / "notes.txt").touch()
    for seed in ("0", "1"):  # the second one in place of the first
        with pytest.raises(SystemExit, match="trained"):
            main(["demo", "--out", str(tmp_path / "demo"), "--epochs", "1", "--seed", seed])
        assert Run(tmp_path / "demo" / "cayley").training.recipe.seed == int(seed)
    assert (tmp_path / "demo" / "cayley" / "notes.txt").exists()


def test_report_shows_everything_and_needs_nothing(trained, call) -> None:
    assert call("report", str(trained / "cayley")).returncode == 0
    page = (trained / "cayley" / "report.html").read_text()
    for text in (
        "AutoAttack",
        "Singular values of each layer",
        "CayleyConv2d(1, 4",
        "certified to",
        "torch 2",
        "recipe",
    ):
        assert text in page
    assert page.count("<svg") == 2
    assert page.count("data:image/png") == 2 * page.count('class="card"') > 0
    assert 'src="http' not in page
    assert "<script" not in page


@pytest.mark.slow
def test_runs_can_be_evaluated_and_reported_again(trained, call) -> None:
    folder = str(trained / "plain")
    result = call("evaluate", folder, "--attack_examples", "10", "--apgd_iterations", "2", "--eps", "0.2")
    assert result.returncode == 0, result.stderr
    assert "eps = 51/255, * attacks on 10 of 500" in result.stdout
    assert call("report", folder).returncode == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--eps", ".inf"], "eps must be positive and finite, got inf"),
        (["--eps", "0"], "eps must be positive and finite, got 0.0"),
        (["--certified_eps", "[0.1, .inf]"], "certified_eps must be finite numbers from 0, got inf"),
        (["--apgd_iterations", "0"], "apgd_iterations must be a positive int, got 0"),
    ],
)
def test_an_evaluation_that_is_refused(trained, call, args: list[str], message: str) -> None:
    result = call("evaluate", str(trained / "cayley"), "--attack_examples", "2", *args)
    assert (result.returncode, message in result.stderr) == (1, True), result.stderr


def test_a_report_says_which_eps(trained, tmp_path, call) -> None:
    shutil.copytree(trained / "cayley", tmp_path / "run")
    path = tmp_path / "run" / "evaluation.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eps": 0.1}))
    assert call("report", str(tmp_path / "run")).returncode == 0
    assert "l2 norm 0.1000 (25.5/255)" in (tmp_path / "run" / "report.html").read_text()


def test_the_table_says_which_eps(trained) -> None:
    row = json.loads((trained / "cayley" / "evaluation.json").read_text())
    for eps, text in ((0.1, "eps = 25.5/255, "), (36 / 255, "eps = 36/255, "), (1.0, "eps = 255/255, ")):
        assert evaluation.table({"cayley": {**row, "eps": eps}}).startswith(text)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("width", [400, 1000])
def test_report_in_a_browser(demo, tmp_path, width: int) -> None:
    """No error on the console, and a page that is no wider than the window."""
    page = (demo[0] / "cayley" / "report.html").read_text()
    probe = "<script>document.title='width '+document.documentElement.scrollWidth</script>"
    copy = tmp_path / "page.html"
    copy.write_text(page.replace("</body>", probe + "</body>"))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --hide-scrollbars --window-size={width},900"
    flags += f" --user-data-dir={tmp_path / 'profile'} --enable-logging=stderr --dump-dom"
    command = ["chromium", *flags.split(), f"file://{copy}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = int(re.search(r"<title>width (\d+)</title>", result.stdout).group(1))
    assert found <= max(width, 500), "headless windows are at least 500 wide"
    assert "CONSOLE" not in result.stderr


def test_data(call) -> None:
    result = call("data", "digits")
    assert "training: 1297 images, 1 x 8 x 8, 10 classes" in result.stdout


@pytest.mark.parametrize(
    "args",
    ["data --data digits", "data digits --data_di x", "train --recipe.epoch 1", "bench layers --round 1"],
)
def test_options_cannot_be_abbreviated(args: str, call) -> None:
    result = call(*args.split())
    assert result.returncode == 2
    assert "unrecognized arguments" in result.stderr


def test_the_bar_shows_a_rate_once_it_is_known() -> None:
    figures = {"loss": 0.5, "accuracy": 0.25}
    assert training._postfix(figures, None, 64) == {"loss": "0.5000", "acc": "25.0%"}
    assert training._postfix(figures, 2.0, 64)["images/s"] == "128"


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> Iterator[Callable[[str], None]]:
    """Make a package that names a module of its own in the group orthoconv.methods."""

    def install(source: str) -> None:
        (tmp_path / "toy-1.0.dist-info").mkdir()
        (tmp_path / "toy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        (tmp_path / "toy-1.0.dist-info" / "entry_points.txt").write_text("[orthoconv.methods]\ntoy = toy_method\n")
        (tmp_path / "toy_method.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        cli.load_methods.cache_clear()

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield install
    sys.modules.pop("toy_method", None)
    methods._METHODS.pop("toy", None)
    monkeypatch.undo()
    cli.load_methods.cache_clear()


def test_methods_of_other_packages(plugin, call) -> None:
    plugin("from orthoconv import nn\nnn.register_method('toy', conv=nn.CayleyConv2d)\nprint('once')")
    result = call("train", "--help")
    assert re.search(r"svcm,\s+toy\b", result.stdout)
    assert call("train", "--model.conv", "toy", "--print_config").stdout.count("once") == 0
    assert result.stdout.count("once") == 1


def test_a_method_that_cannot_be_loaded(plugin, call) -> None:
    plugin("1 / 0")
    result = call("data", "digits")
    assert result.returncode == 1
    assert "the method toy (toy_method) cannot be loaded: ZeroDivisionError" in result.stderr


def test_help_and_version(call) -> None:
    text = call("--help").stdout
    assert all(command in text for command in ("demo", "data", "train", "evaluate", "report"))
    assert "--recipe.margin_factor" in call("train", "--help").stdout
    assert call("--version").stdout.split()[-1] == "0.1.0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["demo", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["demo", "--epochs", "many"], "many"),
        (["demo", "--apgd_iterations", "0"], "apgd_iterations must be a positive int, got 0"),
        (["train", "--recipe.epochz", "3"], "epochz"),
        (["dance"], "dance"),
        (["train", "--data", "cifar10", "--data_dir", "/nowhere"], "/nowhere: no such folder"),
        (["train", "--model.name", "vgg"], "name must be one of 'kwlarge'"),
        (["train", "--model.layers", "[pool 0, flatten, head]"], "'pool SIDE' with positive numbers, got 'pool 0'"),
        (["evaluate", "/nowhere"], "/nowhere is not the folder of a run"),
        (["report", "/nowhere"], "/nowhere has no evaluation"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_arguments(args: list[str], message: str, call) -> None:
    result = call(*args)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def every_command(tree: dict[str, Any] = COMMANDS) -> Iterator[list[str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from ([name, *inner] for inner in every_command(value))
        elif name != "_help":
            yield [name]


@pytest.mark.parametrize("command", list(every_command()), ids=" ".join)
def test_the_help_of_each_command_ends_with_an_example(command: list[str], call) -> None:
    """Its options and positional arguments are accepted, as far as that can be told without running it."""
    text = call(*command, "--help").stdout
    (example,) = re.findall(r"^Example: orthoconv (.*(?:\n.+)*)\Z", text.strip(), flags=re.M)
    args = shlex.split(example.replace("\n", " "))
    assert args[: len(command)] == command
    printed = call(*args, "--print_config")
    assert printed.returncode == 0, printed.stderr


@pytest.mark.parametrize("args", [["--eps", "36/255"], ["--eps=36 / 255"], ["--eps", "0.1411764705882353"]])
def test_a_radius_may_be_a_fraction(args: list[str], call, tmp_path) -> None:
    others = ["--certified_eps", "[36/255, 1/2]"]
    config = yaml.safe_load(call("evaluate", "run", *args, *others, "--print_config").stdout)
    assert (config["eps"], config["certified_eps"]) == (36 / 255, [36 / 255, 0.5])
    train = ["train", "--recipe.eps0", "72/255", "--out", "1/2", "--print_config"]
    config = yaml.safe_load(call(*train).stdout)
    assert (config["recipe"]["eps0"], config["out"]) == (72 / 255, "1/2")
    path = tmp_path / "run.yaml"
    path.write_text("recipe: {eps0: 72/255}\nout: 1/2\n")
    config = yaml.safe_load(call("train", "--config", str(path), "--print_config").stdout)
    assert (config["recipe"]["eps0"], config["out"]) == (72 / 255, "1/2")


@pytest.mark.parametrize("value", ["36/0", "36/", "1/2/3", "a/255", "nonsense", "[1, true]"])
def test_what_is_no_fraction_is_refused(value: str, call) -> None:
    result = call("evaluate", "run", "--eps", value)
    assert result.returncode == 2
    assert f"a fraction such as 36/255, or a list of these, got {value!r}" in result.stderr
    assert "Traceback" not in result.stderr


def test_experiments_and_trials_have_fractions(tmp_path) -> None:
    path = tmp_path / "trials.yaml"
    path.write_text("base: {data: digits, recipe: {eps0: 36/255}}\ntrials: {a: , b: {recipe: {eps0: 0.5}}}\n")
    assert [trial.training.recipe.eps0 for trial in load_trials(path)] == [36 / 255, 0.5]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--resume"], True),
        (["--resume", "--out", "x"], True),
        (["--resume", "true"], True),
        (["--resume", "false"], False),
        (["--resume=false"], False),
        ([], False),
    ],
)
def test_a_flag_needs_no_value(args: list[str], expected: bool, call) -> None:
    printed = call("train", *args, "--print_config")
    assert yaml.safe_load(printed.stdout)["resume"] is expected, printed.stderr


def test_flags_of_recipes_and_of_commands_in_groups(call) -> None:
    config = yaml.safe_load(call("train", "--recipe.augment", "--compile", "--print_config").stdout)
    assert (config["recipe"]["augment"], config["compile"]) == (True, True)
    assert yaml.safe_load(call("bench", "layers", "--keep_memory", "--print_config").stdout)["keep_memory"] is True
    assert flags_of(search) == {"run"}


def test_configuration_files(tmp_path, call) -> None:
    """YAML, any field overridden, unknown keys refused, the result printed."""
    config = tmp_path / "run.yaml"
    config.write_text("data: digits\nmodel:\n  conv: bcop\nrecipe:\n  epochs: 7\n")
    printed = call("train", "--config", str(config), "--recipe.lr", "0.5", "--print_config").stdout
    assert "conv: bcop" in printed
    assert "epochs: 7" in printed
    assert "lr: 0.5" in printed
    config.write_text("recipe:\n  epoch: 7\n")
    result = call("train", "--config", str(config))
    assert result.returncode != 0
    assert "epoch" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_an_evaluation_with_a_false_bound_is_caught(demo) -> None:
    """The negative control: certificates that promise too much are broken, and the evidence is kept."""
    code = f"""
import orthoconv.lab.evaluation as evaluation
from orthoconv.lab.cli import COMMANDS, main
honest = evaluation.certify
evaluation.certify = lambda model, batches, eps, **options: honest(model, batches, eps, lipschitz=1e-3)
main(["evaluate", {str(demo[0] / "cayley")!r}, "--attack_examples", "100", "--apgd_iterations", "5", "--eps", "0.6"])
"""
    result = run(code=code)
    assert result.returncode == 1
    assert "examples that were certified for eps = 0.6" in result.stderr
    assert (demo[0] / "cayley" / "broken.safetensors").exists()


@pytest.mark.filterwarnings("ignore:.*points with zero gradient")
def test_verify_tells_by_its_status(trained, call, monkeypatch) -> None:
    folder = str(trained / "cayley")
    sound = call("verify", folder, "--images", "50")
    assert sound.returncode == 0, sound.stderr
    assert "CayleyConv2d" in sound.stdout
    assert re.search(rf"^{folder}: verified, 7 layers, Lipschitz bound 1\.00000\d\d$", sound.stdout, flags=re.M)
    assert "rounding of the logits" in sound.stdout
    assert call("verify", str(trained / "plain"), "--images", "5").returncode == 0, "it claims nothing"
    assert "claimed 1\n" in sound.stdout
    spec = {**Run(trained / "cayley").config["model"], "normalize": "standardize"}
    arguments = build_arguments(spec, load("digits")[0])
    assert verify.claimed_bound(models.build(**arguments), arguments) > 1, "inputs are divided by less than 1"
    false = call("verify", folder, "--images", "5", "--lipschitz", "0.9")
    assert false.returncode == 1
    assert "but the model claims 0.9" in false.stderr
    unknown = call("verify", "nowhere")
    assert unknown.returncode == 1
    assert "nowhere is neither the folder of a run nor one of kwlarge_cayley_cifar10" in unknown.stderr
    monkeypatch.setattr(verify, "certify", lambda *args: certify(*args, lipschitz=0.1))
    broken = call("verify", folder, "--images", "5", "--attack", "4")
    assert broken.returncode == 1
    assert "certified images changed their class within their radius" in broken.stderr


def test_verify_of_a_network_that_standardizes_few_examples(call, tmp_path) -> None:
    """Its claim is about the deviation of those examples, not of the whole data set."""
    options = ("--model.normalize", "standardize", "--model.width", "0.125", "--recipe.epochs", "1")
    trained = call(
        "train", "--data", "digits", "--out", str(tmp_path), "--examples", "64", "--recipe.batch_size", "64", *options
    )
    assert trained.returncode == 0, trained.stderr
    sound = call("verify", str(tmp_path), "--images", "50")
    assert sound.returncode == 0, sound.stderr
    assert Run(tmp_path).load_model()[0].std.item() == pytest.approx(float(load("digits")[0].images[:64].std()))


@pytest.mark.parametrize(("option", "value"), [("images", "-500"), ("attack", "-600")])
def test_verify_refuses_numbers_below_zero(call, option: str, value: str) -> None:
    refused = call("verify", "kwlarge_cayley_cifar10", f"--{option}", value)
    assert refused.returncode == 1
    assert f"{option} must be at least 0, got {value}" in refused.stderr


def test_without_the_lab_extra_the_command_says_how_to_install_it(monkeypatch) -> None:
    monkeypatch.setattr(orthoconv, "lab", orthoconv.lab)  # a second import replaces it; put the first back afterwards
    for name in [name for name in sys.modules if name.startswith("orthoconv.lab")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    with pytest.raises(SystemExit, match=r'needs jsonargparse; install it with: pip install "orthoconv\[lab\]"'):
        __main__.main()
