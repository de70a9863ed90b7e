"""Configurations: what is refused, in which words, and what is read."""

import itertools

import pytest
import torch

from shardwright.data.digits import write_digits
from shardwright.errors import UsageError
from shardwright.training.zoo.config import load_config, shipped_names, to_yaml
from shardwright.training.zoo.tables import LOSSES, MODELS, make_loss, make_model
from shardwright.training.zoo.train import prepare

SMALL = """
data: {type: table, batch_size: 8, samples: 16}
model: {name: two_matmuls}
loss: {name: mse}
"""


@pytest.fixture
def config(tmp_path):
    """Writes a configuration and returns its path."""

    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    write_digits(folder, "mnist")
    return str(folder)


WRONG = {
    "train.epoch=3": "train.epoch is unknown; did you mean train.epochs?",
    "optimiser.lr=3": "optimiser is unknown; did you mean optimizer?",
    "eval.zzz=3": "eval.zzz is unknown; known: enabled, batch_size",
    "train.epochs=three": "train.epochs: expected a whole number, got 'three'",
    "train.epochs=1.5": "train.epochs: expected a whole number, got 1.5",
    "train.epochs=true": "train.epochs: expected a whole number, got True",
    "train.epochs=null": "train.epochs: expected a whole number, got nothing",
    "train.epochs=0": "train.epochs: expected a whole number of at least 1, got 0",
    "optimizer.lr=fast": "optimizer.lr: expected a number, got 'fast'",
    "optimizer.lr=0": "optimizer.lr: expected a number of more than 0, got 0",
    "optimizer.momentum=1": "optimizer.momentum: expected a number of from 0 to below 1, got 1",
    "system.distribute=maybe": "system.distribute: expected true or false, got 'maybe'",
    "parallel.mode=automatic": "parallel.mode: 'automatic' is unknown; choose one of single, data, semi-auto, auto; "
    "did you mean auto?",
    "optimizer.name=sgdd": "optimizer.name: 'sgdd' is unknown; choose one of sgd, adamw; did you mean sgd?",
    "model.hidden=[3,x]": "model.hidden[1]: expected a whole number, got 'x'",
    "model.hidden=3": "model.hidden: expected a list, got 3",
    "parallel.pins=3": "parallel.pins: expected keys with values, got 3",
    "train=3": "train: expected keys with values, got 3",
    "data.type=imagenet": "data.type: 'imagenet' is unknown; choose one of mnist, cifar10, random, characters, table",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_said_in_one_line(override):
    with pytest.raises(UsageError) as refused:
        load_config("mnist_mlp", ["optimizer.name=sgd", override])
    [_, line] = str(refused.value).splitlines()
    assert line.strip() == WRONG[override]


def test_everything_that_is_wrong_is_said_at_once(config):
    path = config(SMALL + "train: {epoch: 1, steps: 0}\nsytem: {seed: 1}\n")
    with pytest.raises(UsageError) as refused:
        load_config(path)
    assert str(refused.value).splitlines() == [
        f"{path}:",
        "  sytem is unknown; did you mean system?",
        "  train.epoch is unknown; did you mean train.epochs?",
        "  train.steps: expected a whole number of at least 1, got 0",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: [1", "run.yaml: while parsing"),
        ("- 1\n- 2", "run.yaml: expected sections with keys, got ListConfig"),
        ("model: {name: two_matmuls}", "the section data is missing"),
        ("data: {batch_size: 3}\nmodel: {name: gpt}", "data.type is missing; choose one of mnist, cifar10, random"),
        (SMALL + "train: {epochs: '${data.nothing}'}", "run.yaml: Interpolation key 'data.nothing' not found"),
    ],
)
def test_files_that_are_no_configuration_are_refused(config, text, message):
    with pytest.raises(UsageError) as refused:
        load_config(config(text))
    assert message in str(refused.value)


def test_a_configuration_without_a_loss_has_that_of_its_model(config):
    assert load_config(config(SMALL.replace("loss: {name: mse}", ""))).loss.name == "mse"
    assert load_config("mnist_mlp").loss.name == "cross_entropy"
    with pytest.raises(UsageError) as refused:
        load_config("mnist_mlp", ["model.name=perceptrom"])
    [line] = str(refused.value).splitlines()[1:]
    assert line.strip().startswith("model.name: 'perceptrom' is unknown; choose one of perceptron, resnet18, ")


def test_names_are_found_without_path_or_suffix_and_near_ones_are_proposed():
    assert load_config("mnist_mlp") == load_config("mnist_mlp.yaml")
    with pytest.raises(UsageError, match=r"no file mnist_mpl and .* quickstart; did you mean mnist_mlp\?"):
        load_config("mnist_mpl")
    with pytest.raises(UsageError, match=r"-o train\.epochs sets nothing; type -o key=value"):
        load_config("mnist_mlp", ["train.epochs"])


@pytest.mark.parametrize("name", ["mnist_mlp", "cifar10_resnet18", "cifar10_resnet50", "gpt_char", "quickstart"])
def test_a_saved_configuration_is_the_same_again(name, tmp_path):
    before = load_config(name, ["train.epochs=3", "optimizer.lr=1e-3"])
    assert (before.train.epochs, before.optimizer.lr) == (3, 1e-3)
    (tmp_path / "config.yaml").write_text(to_yaml(before))
    assert load_config(str(tmp_path / "config.yaml")) == before
    assert name in shipped_names()


def problems(name, *overrides):
    with pytest.raises(UsageError) as refused:
        prepare(name, overrides)
    return [line.strip() for line in str(refused.value).splitlines()[1:]]


def test_paths_shapes_and_classes_are_checked_before_anything_runs(mnist):
    root = f"data.root={mnist}"
    [line] = problems("mnist_mlp", "data.root=nowhere")
    assert line.startswith("data: nowhere: found neither train-images-idx3-ubyte nor")
    assert "Download" in line
    assert problems("mnist_mlp", root, "model.num_classes=5") == [
        "model.num_classes: expected at least the 10 of the data, got 5"
    ]
    assert problems("mnist_mlp", root, "loss.name=mse") == [
        "loss.name: the mnist data have classes as their targets; use cross_entropy"
    ]
    assert problems("mnist_mlp", root, "data.batch_size=null") == [
        "data.batch_size or data.batch_size_per_rank: expected one of them, got neither"
    ]
    assert problems("mnist_mlp", root, "model.frozen=[layer.*]") == [
        "model.frozen: no parameter of perceptron is called layer.*"
    ]
    assert problems("mnist_mlp", root, "optimizer.scale_lr=linear") == [
        "optimizer.base_batch is missing: scale_lr linear divides the samples of a step by it"
    ]
    [line] = problems("mnist_mlp", root, "parallel.plan=plan.json", "parallel.mesh=null")
    assert line.startswith("parallel.plan: there is no file plan.json")
    [line] = problems("mnist_mlp", root, "parallel.mesh=a4")
    assert line.startswith("parallel.mesh: a mesh is written as dp=2,tp=4; got")


def test_models_that_cannot_take_the_data_are_refused(config, mnist):
    data = f"data: {{type: mnist, root: {mnist}, batch_size: 8}}\n"
    assert problems(config(data + "model: {name: resnet18}")) == [
        "model.name: resnet18 takes images of shape [3, height, width], the data have [1, 28, 28]"
    ]
    assert problems(config(data + "model: {name: gpt}")) == [
        "model.name: gpt takes rows of ids, the data have torch.float32 of shape [1, 28, 28]"
    ]
    text = "data: {type: characters, batch_size: 8}\n"
    assert problems(config(text + "model: {name: perceptron}")) == [
        "model.name: perceptron takes numbers, the data have ids; use gpt"
    ]
    assert problems("gpt_char", "model.heads=3") == ["model.width: expected a multiple of model.heads=3, got 128"]
    assert problems("gpt_char", "model.vocabulary=2")[0].startswith("model.vocabulary: expected at least the ")


WRONG_TOGETHER = {
    ("scheduler.warmup_steps=640",): "scheduler.warmup_steps: expected less than the run, which has 640 steps in 10 "
    "epochs, got 640 steps of warm-up; train longer or lower it",
    ("scheduler.warmup_epochs=10",): "scheduler.warmup_epochs: expected less than the run, which has 640 steps in 10 "
    "epochs, got 640 steps of warm-up; train longer or lower it",
    ("scheduler.name=constant", "scheduler.warmup_steps=320", "train.accumulate=2"): "scheduler.warmup_steps: expected "
    "less than the run, which has 320 steps in 10 epochs, got 320 steps of warm-up; train longer or lower it",
    ("scheduler.warmup_steps=1", "scheduler.warmup_epochs=1"): "scheduler.warmup_steps or scheduler.warmup_epochs: "
    "expected one of them, got both",
    (
        "data.drop_last=true",
        "data.batch_size=641",
    ): "data.drop_last: true leaves no batch: the global batch is 641, the data have 640 samples",
    ("optimizer.name=adamw", "optimizer.betas=[0.9]"): "optimizer.betas: expected two numbers, got 1",
    (
        "optimizer.name=sgd",
        "optimizer.nesterov=true",
    ): "optimizer.nesterov: true needs a momentum; type -o optimizer.momentum=0.9",
    ("parallel.mesh=dp=3",): "parallel.mesh: dp=3 is for 3 ranks, got 1",
}


TABLE = """
data: {type: table, batch_size: 10, samples: 640}
model: {name: two_matmuls}
loss: {name: mse}
scheduler: {name: cosine}
"""


@pytest.mark.parametrize("overrides", WRONG_TOGETHER)
def test_options_that_do_not_fit_each_other_are_said_in_one_line(overrides, config):
    assert problems(config(TABLE), *overrides) == [WRONG_TOGETHER[overrides]]


def test_a_run_is_as_long_as_its_ranks_make_it(config):
    path = config(TABLE)
    overrides = ["data.batch_size=null", "data.batch_size_per_rank=10", "scheduler.warmup_steps=300"]
    assert prepare(path, overrides, ranks=2).config.scheduler.warmup_steps == 300
    with pytest.raises(UsageError, match="which has 220 steps in 10 epochs, got 300"):
        prepare(path, overrides, ranks=3)  # 22 batches of 30, the last of which is not full


DATA = {
    "table": "{type: table, batch_size: 2}",
    "random": "{type: random, batch_size: 2, samples: 2, test_samples: 2, shape: [3, 8, 8], classes: 5}",
    "grey": "{type: random, batch_size: 2, samples: 2, test_samples: 2, shape: [1, 8, 8]}",
    "characters": "{type: characters, batch_size: 2}",
}


@pytest.mark.filterwarnings("ignore::shardwright.data.images.RandomDataWarning")
@pytest.mark.parametrize("data", DATA)
def test_what_is_not_refused_runs(config, data):
    """Every model with every loss on every kind of data: a line that says what does not fit, or a loss."""
    ran, refused = set(), []
    for model, loss in itertools.product(MODELS.rows, LOSSES.rows):
        path = config(f"data: {DATA[data]}\nmodel: {{name: {model}}}\nloss: {{name: {loss}}}\n")
        try:
            experiment = prepare(path)
        except UsageError as error:
            refused.append(str(error).splitlines())
            continue
        samples = experiment.data.train
        batch = torch.utils.data.default_collate([samples[0], samples[1]])
        with torch.device("meta"):
            made = make_model(experiment.config.model, experiment.data)
        loss_fn = make_loss(experiment.config.loss, torch.float32)
        assert loss_fn(made, [part.to("meta") for part in batch]).shape == ()
        ran.add(f"{model} {loss}")
    assert (
        ran
        == {
            "table": {"perceptron mse", "two_matmuls mse"},
            "random": {f"{model} cross_entropy" for model in ("perceptron", "resnet18", "resnet50")},
            "grey": {"perceptron cross_entropy"},
            "characters": {"gpt cross_entropy"},
        }[data]
    )


def test_one_process_of_many_cannot_train_alone(mnist, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    [line] = problems("mnist_mlp", f"data.root={mnist}", "system.distribute=false")
    assert line.startswith("system.distribute: false trains alone, but torchrun started 4 processes")
