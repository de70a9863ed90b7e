"""`shardwright plan` and `shardwright verify` as people call them: what they print, and their exit codes."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from shardwright.cli import main
from shardwright.errors import UsageError
from shardwright.runtime.verification.build import BuildFunction, as_batches

PAGE = Path(__file__).parents[1] / "docs" / "measuring" / "verify.md"
COMMAND = Path(sys.executable).with_name("shardwright")

NET = """
    import torch
    from torch import nn

    def loss_fn(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y)

    def build():
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        return model, loss_fn, (torch.randn(16, 8), torch.randint(0, 4, (16,)))
"""
DEFECT = """
    from shardwright.runtime.programs.buckets import GradientReduction
    GradientReduction.reduce = lambda self, keys, gradients, *_: list(gradients)
"""


WIDE = NET.replace("8, 32", "8, 1 << 40").replace("32, 4", "1 << 40, 4")  # 53 TB of parameters


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(sys, "path", list(sys.path))  # a file that is loaded adds its folder
    write("net.py", NET)


def write(name, *texts):
    Path(name).write_text("\n".join(textwrap.dedent(text) for text in texts))


def shardwright(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["shardwright", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    written = capsys.readouterr()
    return exit_.value.code or 0, written.out, written.err


def test_a_plan_is_shown_saved_and_loaded(monkeypatch, capsys):
    code, shown, _ = shardwright(
        monkeypatch, capsys, "plan", "net.py:build", "--devices", "8", "--mode", "data", "--save", "plan.json"
    )
    assert code == 0
    assert "plan: mode data, search none, mesh dp=8, 8 devices" in shown
    assert "linear" in shown
    assert "time: building " in shown
    assert "with storage" not in shown
    full = shardwright(monkeypatch, capsys, "plan", "net.py:build", "--devices", "8", "--mode", "data", "--full")[1]
    assert "net.py:7" in full
    assert ("in strategy" in full, "in strategy" in shown) == (True, False)
    code, loaded, _ = shardwright(monkeypatch, capsys, "plan", "net.py:build", "--load", "plan.json")
    assert code == 0
    assert loaded.split("time:")[0] == shown.split("time:")[0]
    assert "loading" in loaded.split("time:")[1]
    code, _, error = shardwright(monkeypatch, capsys, "plan", "net.py:build", "--load", "plan.json", "--devices", "4")
    assert (code, error) == (2, "shardwright: plan.json is a plan for 8 devices, not for 4; plan again\n")


def test_a_plan_is_explained_compared_and_printed_as_json(monkeypatch, capsys):
    command = ["plan", "net.py:build", "--mesh", "dp=2,tp=2", "--hardware", "h100"]
    code, shown, error = shardwright(monkeypatch, capsys, *command, "--json", "--compare")
    assert (code, error) == (0, "")
    found = json.loads(shown)
    assert found["mesh"] == {"dp": 2, "tp": 2}
    assert list(found["known_plans"]) == ["this plan", "data parallel", "tensor parallel", "fully sharded"]
    assert found["known_plans"]["this plan"]["step_s"] == pytest.approx(found["step_s"])
    assert set(found["seconds"]) == {"building", "capturing", "planning"}
    code, shown, _ = shardwright(monkeypatch, capsys, *command, "--explain", "0.weight")
    assert code == 0
    assert shown.startswith("0.weight: a parameter of shape [32, 8], stored ")
    assert "\nfully sharded " in shardwright(monkeypatch, capsys, "plan", "--compare", *command[1:])[1]
    code, _, error = shardwright(monkeypatch, capsys, *command, "--json", "--full")
    assert code == 2
    assert "--full, --explain and --json each print something else" in error


def test_a_plan_is_a_page_for_a_browser_beside_another(monkeypatch, capsys):
    command = ["plan", "net.py:build", "--mesh", "dp=2,tp=2", "--hardware", "h100"]
    assert shardwright(monkeypatch, capsys, *command, "--mode", "data", "--save", "other.json")[0] == 0
    both = ["--compare", "other.json", "--compare", "--html", "plan.html"]
    code, shown, error = shardwright(monkeypatch, capsys, *command, *both)
    assert (code, error) == (0, "")
    assert "beside other.json, the other:\nthis plan: mode auto" in shown
    told = json.loads(Path("plan.html").read_text().split('id="told">')[1].split("</script>")[0])
    assert list(told["plans"]) == ["this plan", "other.json", "data parallel", "tensor parallel", "fully sharded"]
    code, _, error = shardwright(monkeypatch, capsys, *command, "--json", "--compare=other.json")
    assert (code, "--beside adds to a page: leave out --json" in error) == (2, True)
    code, _, error = shardwright(monkeypatch, capsys, *command, "--html", "none/plan.html")
    assert (code, "cannot write the page none/plan.html: No such file" in error) == (2, True)


def test_a_plan_with_stages_is_explained_compared_drawn_and_printed_as_json(monkeypatch, capsys):
    command = ["plan", "net.py:build", "--mesh", "pp=2", "--hardware", "h100", "--microbatches", "4"]
    code, shown, error = shardwright(
        monkeypatch, capsys, *command, "--json", "--compare", "--html", "plan.html", "--save", "plan.json"
    )
    assert (code, error) == (0, "")
    found = json.loads(shown)
    assert [stage["modules"] for stage in found["stages"]] == [["0-2"], []]
    plans = found["known_plans"]
    assert plans["this plan"]["bubble"] == pytest.approx(found["schedule"]["bubble"])
    assert {"schedule 1f1b", "schedule gpipe", "schedule interleaved"} - plans.keys() == {
        f"schedule {found['schedule']['name']}"
    }
    told = json.loads(Path("plan.html").read_text().split('id="told">')[1].split("</script>")[0])
    assert len(told["schedules"][0]) == 2
    command[2:4] = ["--load", "plan.json"]
    code, shown, error = shardwright(monkeypatch, capsys, *command[:-2], "--full", "--beside", "plan.json")
    assert (code, error) == (0, "")
    assert "2 pipeline stages on 2 groups of ranks, 4 microbatches" in shown
    assert "no operators differ" in shown
    code, shown, error = shardwright(monkeypatch, capsys, *command[:-2], "--explain", "2")
    assert (code, error) == (0, "")
    assert "It is in stage 0 of 2, on the ranks pp=0." in shown
    assert "\nschedule " in shardwright(monkeypatch, capsys, *command[:-2], "--compare")[1]


def test_devices_on_several_hosts_pay_for_the_links_between_them(monkeypatch, capsys):
    def step_s(*arguments):
        command = ["plan", "net.py:build", "--mesh", "dp=4", "--mode", "data", "--hardware", "h100", "--json"]
        code, shown, error = shardwright(monkeypatch, capsys, *command, *arguments)
        return (json.loads(shown)["step_s"], "") if code == 0 else (0.0, error)

    (alone, _), (two, _), (four, _) = step_s(), step_s("--hosts", "2"), step_s("--hosts", "4")
    assert alone < two < four
    command = ["plan", "net.py:build", "--devices", "2", "--mode", "data", "--hosts", "2", "--json"]
    assert json.loads(shardwright(monkeypatch, capsys, *command)[1])["hardware"] == "cpu_host"  # which gloo joins
    message = "--hosts 3 for 4 devices: each has as many; type a number that divides 4"
    assert message in step_s("--hosts", "3")[1]


def test_a_plan_keeps_within_the_memory_of_a_device(monkeypatch, capsys):
    command = ["plan", "net.py:build", "--mesh", "dp=4", "--optimizer", "sgd", "--json"]
    code, shown, _ = shardwright(monkeypatch, capsys, *command, "--memory", "4kB")
    held = json.loads(shown)["held_bytes"]
    assert (code, json.loads(shown)["hardware"]) == (0, "cpu_host_shm")
    assert held["total"] <= 4000
    assert held["optimizer"] == 0
    code, _, error = shardwright(monkeypatch, capsys, *command, "--memory", "1kB")
    assert code == 2
    assert "no plan was found under which a device holds 1.0 kB or less" in error
    code, _, error = shardwright(monkeypatch, capsys, *command, "--memory", "much")
    assert code == 2
    assert "memory is 'much'; expected how many bytes each device may hold" in error


def test_a_plan_takes_what_a_reserve_leaves_of_a_device(monkeypatch, capsys):
    code, shown, _ = shardwright(
        monkeypatch, capsys, "plan", "net.py:build", "--mesh", "dp=4", "--hardware", "h100", "--memory", "auto"
    )
    assert code == 0
    assert "of 80.6 GB that a device may hold" in shown
    assert "memory: of the 84.9 GB of a device a plan may hold 80.6 GB; kept free are 1.5 GB for CUDA's" in shown
    code, _, error = shardwright(monkeypatch, capsys, "plan", "net.py:build", "--mesh", "dp=4", "--memory", "auto")
    assert code == 2
    assert "the hardware profile cpu_host_shm names no memory of a device; type how many bytes" in error


def test_a_model_larger_than_any_memory_is_planned(monkeypatch, capsys):
    write("net.py", WIDE)
    arguments = ["plan", "net.py:build", "--mesh", "dp=2,tp=4", "--search", "propagation", "--hardware", "h100"]
    code, shown, _ = shardwright(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "mode auto, search propagation, mesh dp=2 tp=4" in shown


def test_a_model_that_reads_values_is_built_with_storage(monkeypatch, capsys):
    write("net.py", NET.replace("model = nn", "width = int(torch.linspace(0, 32, 2)[1].item()); model = nn"))
    code, shown, _ = shardwright(monkeypatch, capsys, "plan", "net.py:build", "--devices", "2")
    assert code == 0
    assert "built with storage, since it cannot be built on the meta device: net.py:build raised RuntimeError" in shown
    assert "at net.py:" in shown


@pytest.mark.parametrize(
    ("edit", "arguments", "message"),
    [
        (None, ["nett.py:build", "--devices", "2"], "the script nett.py does not exist"),
        (None, ["nett.py:build", "--devices", "2"], "near it: net.py"),
        (None, ["net.py:biuld", "--devices", "2"], "net.py has no function biuld; it has build"),
        (None, ["net.py", "--devices", "2"], "net.py names no function; type net.py:build, build being a function"),
        (None, ["net.py", "--devices", "2"], "functions there: loss_fn, build"),
        (None, ["net.py:build"], "for how many devices? type --devices 8 or --mesh dp=2,tp=4"),
        (None, ["net.py:build", "--devices", "0"], "--devices 0 is no number of devices"),
        (None, ["net.py:build", "--mesh", "dp=2", "--devices", "4"], "--mesh dp=2 has 2 devices, --devices says 4"),
        (None, ["net.py:build", "--mesh", "dp2"], "a mesh is written as dp=2,tp=4; got 'dp2'"),
        (None, ["net.py:build", "--load", "none.json"], "cannot read the plan none.json: No such file"),
        (("return model, loss_fn", "return model"), [], "it returned a tuple of 2"),
        (("return model, ", "return [model], "), [], "its model is list, not a torch.nn.Module"),
        (("return model, loss_fn", "return model, 1"), [], "its loss function is int, not a function of"),
        (("return model, loss_fn,", "return"), [], "must return (model, loss_fn, batch), with a list"),
        (("model = ", "model = 1 / 0"), [], "net.py cannot be loaded: SyntaxError"),
        (("import torch", "import torchh"), [], "net.py cannot be loaded: ModuleNotFoundError: No module named"),
        (("torch.randn(16, 8)", "missing"), [], "net.py:build raised NameError: name 'missing' is not defined, at net"),
        (("model(x), y)", "model(x), y).item()"), [], "item() needs the value of a tensor"),
        (("(16,)))", '(16,))), {"0": ((2, 1), (3, 1))}'), [], "net.py"),
        (("(16,)))", '(16,))), {"layers.9": ((2, 1), (1, 1))}'), [], "layers.9"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_readable_message(edit, arguments, message, monkeypatch, capsys):
    if edit is not None:
        assert edit[0] in NET
        write("net.py", NET.replace(*edit))
    arguments = arguments or ["net.py:build", "--devices", "4"]
    code, shown, error = shardwright(monkeypatch, capsys, "plan", *arguments)
    assert code == 2
    assert shown == ""
    assert error.startswith("shardwright: ")
    assert message in error
    assert "Traceback" not in error


def verify_command(*arguments):
    return subprocess.run(
        [COMMAND, "verify", *arguments], capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )


@pytest.mark.slow  # the promise is verified by sw.verify in tests/runtime/verification
def test_verify_of_a_right_plan_ends_with_0(monkeypatch, capsys):
    assert shardwright(
        monkeypatch, capsys, "plan", "net.py:build", "--devices", "2", "--mode", "data", "--save", "plan.json"
    )[0] == 0  # fmt: skip
    done = verify_command("net.py:build", "-n", "2", "--plan", "plan.json", "--steps", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 steps of AdamW at 0.001 on 2 ranks: mode data, search none, mesh dp=2\n")
    assert done.stdout.endswith("within tolerance: the plan gives what one device gives\n")
    assert done.stderr == ""
    assert sorted(path.name for path in Path().glob("*.*")) == ["net.py", "plan.json"]
    assert not list((Path().absolute().parent / "tmp").iterdir())


@pytest.mark.slow
def test_verify_of_a_defect_ends_with_1_and_names_the_tensor():
    write("net.py", NET, DEFECT)
    done = verify_command("net.py:build", "-n", "2", "--mode", "data", "--steps", "1", "--dtype", "float64")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\nfloat64 gradients: 0." in done.stdout or "\nfloat64 gradients: 2." in done.stdout
    assert done.stdout.endswith("BEYOND TOLERANCE\n")
    assert "float32" not in done.stdout


@pytest.mark.slow
def test_verify_tells_what_the_ranks_have_to_say_once():
    write("net.py", NET.replace("model(x), y)", "model(x), y).item()"))
    done = verify_command("net.py:build", "-n", "2")
    assert done.returncode == 2
    assert done.stderr.startswith("shardwright: item() needs the value of a tensor while the model is captured, at ")
    assert done.stderr.count("shardwright: ") == 1
    assert done.stdout == ""


@pytest.mark.slow
def test_verify_of_a_rank_that_crashes_ends_with_2_and_names_it():
    write("net.py", NET, "import os\nif os.environ['RANK'] == '1': os._exit(1)")
    done = verify_command("net.py:build", "-n", "2")
    assert done.returncode == 2
    assert "rank 1 failed first: exit code 1" in done.stderr


def test_verify_of_no_file_starts_nothing(monkeypatch, capsys):
    code, _, error = shardwright(monkeypatch, capsys, "verify", "nett.py:build", "-n", "2")
    assert code == 2
    assert "the script nett.py does not exist" in error


def test_one_batch_or_several():
    import torch

    x, y = torch.ones(2), torch.zeros(2)
    assert as_batches((x, y)) == ((x, y),)
    assert as_batches(x) == (x,)
    assert as_batches({"x": x}) == ({"x": x},)
    assert as_batches([(x, y), (y, x)]) == ((x, y), (y, x))
    assert as_batches(batch for batch in [x, y]) == (x, y)
    with pytest.raises(UsageError, match="there is no batch"):
        as_batches([])


def test_a_file_finds_its_neighbours_and_its_classes():
    import pickle

    write("neighbour.py", "width = 8")
    write(
        "net.py",
        NET,
        "import dataclasses, neighbour\n@dataclasses.dataclass\nclass Thing:\n    n: int = neighbour.width",
    )
    built = BuildFunction.parse("net.py:build").load()()
    assert built.pins == {}
    assert len(built.batches) == 1
    thing = sys.modules["shardwright_build_net"].Thing()
    assert thing.n == 8
    assert pickle.loads(pickle.dumps(thing)) == thing


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_page_about_verify_tells_the_truth(monkeypatch, capsys):
    page = PAGE.read_text()
    write("net.py", *(block.split("```")[0] for block in page.split("```python\n")[1:]))
    commands = [line.split()[1:] for line in page.splitlines() if line.startswith("shardwright ")]
    commands.append(["plan", "net.py:build", "--load", "plan.json"])
    assert [command[0] for command in commands] == ["verify", "verify", "plan", "verify", "plan"]
    for command in commands[2::2]:
        assert " ".join(command) in page
        assert shardwright(monkeypatch, capsys, *command)[0] == 0
    for command, says in (commands[1], "the loop train on 4 ranks"), (commands[3], "3 steps of AdamW"):
        done = verify_command(*command[1:])
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(says)


HALF = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    def made(within):
        def build():
            def loss_fn(model, batch):
                if within is None:
                    return F.cross_entropy(model(batch[0]), batch[1])
                with within():
                    return F.cross_entropy(model(batch[0]), batch[1])

            model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
            return model, loss_fn, (torch.zeros(4096, 1024), torch.zeros(4096, dtype=torch.long))

        return build

    none = made(None)
    cpu = made(lambda: torch.autocast("cpu", torch.bfloat16))
    cuda = made(lambda: torch.autocast("cuda", torch.bfloat16))
    usual = made(lambda: torch.autocast(device_type="cuda"))
"""


def test_a_plan_for_gpus_is_made_in_the_precision_of_the_step(monkeypatch, capsys):
    write("half.py", HALF)

    def head(build, *more, hardware="h100"):
        on = ("--devices", "4", "--mode", "data", "--hardware", hardware)
        code, shown, errors = shardwright(monkeypatch, capsys, "plan", f"half.py:{build}", *on, *more)
        assert (code, errors) == (0, "")
        return shown.splitlines()[1:3], "captured on a CPU" in shown

    full, half = head("none"), head("cpu")
    assert full[0][0].startswith("run: computes in float32 (in bfloat16 about ")
    assert "a step, without the casts: type --precision bf16); " in full[0][0]
    assert half[0][0].startswith("run: computes in bfloat16; ")
    for found in (head("cuda"), head("none", "--precision", "bf16")):
        assert found[0] == half[0]
    if not torch.cuda.is_available():
        assert [full[1], head("cuda")[1]] == [False, True]
    assert head("usual")[0][0].startswith("run: computes in float16; ")
    assert head("none", "--precision", "fp16")[0] == head("usual")[0]
    assert head("none", "--precision", "float32")[0] == full[0]
    assert head("none", "--precision", "bf16", hardware="cpu")[0][0].startswith("run: computes in bfloat16; ")


def test_a_plan_in_half_precision_is_saved_and_loaded(monkeypatch, capsys):
    write("half.py", HALF)
    given = ("--hardware", "h100", "--precision", "bf16", "--json")
    on = ("--devices", "4", "--mode", "data", "--save", "half.json")
    saved = json.loads(shardwright(monkeypatch, capsys, "plan", "half.py:none", *given, *on)[1])
    loaded = json.loads(shardwright(monkeypatch, capsys, "plan", "half.py:none", *given, "--load", "half.json")[1])
    assert (saved["dtype"], saved["bf16_step_s"]) == ("bfloat16", None)
    assert saved["step_s"] == loaded["step_s"]
    full = ("plan", "half.py:none", "--hardware", "h100", "--load", "half.json")
    code, _, error = shardwright(monkeypatch, capsys, *full)
    assert code == 2
    assert "plan again" in error
    code, _, error = shardwright(monkeypatch, capsys, *full, "--precision", "half")
    assert code == 2
    assert "'half' is not one of 'float32', 'bf16', 'fp16'" in error
