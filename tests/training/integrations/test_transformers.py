"""Models of transformers train on all ranks as on one, by a loop or their Trainer, and go back to from_pretrained."""

import contextlib
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest

import shardwright as sw
from ranks import run_ranks
from shardwright.errors import CheckpointError, UsageError

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
sys.path.append(str(Path(__file__).parents[2] / "families"))
SPLIT = {"mode": "auto", "mesh": "tp=2", "search": "propagation", "inputs": "whole"}


def family(name):
    from families import FAMILIES

    return next(family for family in FAMILIES if family.name == name)


def looped(name, folder, options, limit):
    """Three steps, saved; how far the weights that transformers reads are from ours, and what the files are."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    world, told = sw.init(), family(name)
    batch = told.batch(0)
    parallel = sw.parallelize(told.model(), told.loss, batch, batch="global", **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(3):
        parallel(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    sw.checkpoint.save_pretrained(parallel, folder, max_shard_size=limit)
    files = sorted(path.name for path in Path(folder).iterdir())
    sw.checkpoint.save_pretrained(parallel, folder, max_shard_size=limit)  # in place of what is there
    assert sorted(path.name for path in Path(folder).iterdir()) == files
    ours = parallel.full_state_dict()
    if world.rank:
        return None
    theirs = type(told.model()).from_pretrained(folder, dtype=told.dtype)
    model = told.model()
    model.load_state_dict(ours)
    same = {key: torch.equal(value, ours[key]) for key, value in theirs.state_dict().items()}
    model.save_pretrained(f"{folder}-whole", max_shard_size=limit)
    return files, same, any(hasattr(p, "placements") for p in parallel.parameters())


def check_written(name, tmp_path, options=SPLIT, ranks=2):
    (files, same, split), *_ = run_ranks(ranks, looped, name, str(tmp_path / "model"), options, "20KB", timeout=250)
    assert all(same.values()), [key for key, equal in same.items() if not equal]
    assert split
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    whole = json.loads((tmp_path / "model-whole" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == whole["metadata"]
    assert set(index["weight_map"]) == set(whole["weight_map"])
    assert set(index["weight_map"].values()) == {file for file in files if file.endswith(".safetensors")}
    ours, theirs = (
        {path.name: path.read_text() for path in (tmp_path / folder).glob("*config.json")}
        for folder in ("model", "model-whole")
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_experts_that_transformers_keeps_apart_in_files_are_read_as_they_are_here(tmp_path):
    found, *_ = run_ranks(2, looped, "mixtral", str(tmp_path / "model"), SPLIT, "20KB", timeout=250)
    assert all(found[1].values()), found[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt2", "t5"])  # gpt2 ties its weights
def test_other_models_are_written(name, tmp_path):
    check_written(name, tmp_path)
    check_written(name, tmp_path / "four", {"mode": "auto", "mesh": "dp=2,tp=2", "search": "propagation"}, 4)


@pytest.mark.slow
def test_what_cannot_be_written_is_refused(tmp_path):
    import transformers

    folder = tmp_path / "model"
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=1)
    )
    with pytest.raises(UsageError, match=r"max_shard_size='5 apples': expected the bytes of a file, as '5GB'"):
        sw.checkpoint.save_pretrained(model, folder, max_shard_size="5 apples")
    with pytest.raises(CheckpointError, match=r"test_transformers.py cannot be written: File exists"):
        sw.checkpoint.save_pretrained(model, __file__)
    assert not folder.exists()


ROWS, STEPS = 8, 5


def rows():
    """Sequences with a label for most words, as many labels in each as happens."""
    batches = [family("llama").batch(seed) for seed in range(ROWS * STEPS // 4)]
    return [{key: value[row] for key, value in batch.items()} for batch in batches for row in range(4)]


def by_trainer(ours, output, ranks, options, changed=(), stop=None, resume=None):
    """The losses that the Trainer logs; of those before it goes on, too. After step ``stop`` it saves and ends."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if ours:
        from shardwright.training.integrations.huggingface import Trainer
    else:
        from transformers import Trainer

    class Own(Trainer):
        """A user's own subclass."""

        def create_optimizer(self, *args):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return self.optimizer

    class Stop(transformers.TrainerCallback):
        """As a job that is ended after a save."""

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = control.should_save = state.global_step == stop

    sw.init()
    data = rows()
    arguments = {
        "per_device_train_batch_size": ROWS // ranks, "per_device_eval_batch_size": ROWS // ranks, "logging_steps": 1,
        "num_train_epochs": 2, "report_to": [], "use_cpu": True, "save_strategy": "epoch", "save_only_model": True,
        "seed": 3, "disable_tqdm": True, "eval_strategy": "epoch", "max_grad_norm": 0.5, **dict(changed),
    }  # fmt: skip
    more = {"parallelize": options} if ours else {}
    if stop:
        more["callbacks"] = [Stop()]
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = Own(
            family("llama").model(), transformers.TrainingArguments(output, **arguments), train_dataset=data,
            eval_dataset=data[:ROWS], **more,
        )  # fmt: skip
        try:
            trainer.train(resume_from_checkpoint=resume)
        except UsageError as error:
            return str(error)
    lines = trainer.state.log_history
    if arguments.get("load_best_model_at_end"):
        lines = [*lines, trainer.evaluate()]
    return [line.get("loss", line.get("eval_loss")) for line in lines if "train_loss" not in line]


def check_trainer(tmp_path, ranks, options):
    [expected] = run_ranks(1, by_trainer, False, str(tmp_path / "alone"), 1, {}, timeout=200)
    assert len(expected) == 2 * (STEPS + 1)
    for losses in run_ranks(ranks, by_trainer, True, str(tmp_path / "ranks"), ranks, options, timeout=200):
        assert losses == pytest.approx(expected, rel=0, abs=5e-6)  # transformers sums the loss in float32
    assert (tmp_path / "ranks" / f"checkpoint-{2 * STEPS}" / "model.safetensors").exists()


needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate"
)


@needs_accelerate
@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize(("ranks", "options"), [(2, {"mode": "data"}), (4, {"mesh": "dp=2,tp=2"})], ids=["data", "4"])
def test_the_trainer_logs_the_losses_of_one_device(tmp_path, ranks, options):
    check_trainer(tmp_path, ranks, options)


@needs_accelerate
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_accumulated_batches_and_a_run_that_goes_on_on_other_ranks_lose_what_one_device_does(tmp_path):
    changed = {"gradient_accumulation_steps": 2, "save_only_model": False, "load_best_model_at_end": True}
    output = str(tmp_path / "ranks")
    [expected] = run_ranks(1, by_trainer, False, str(tmp_path / "alone"), 1, {}, changed, timeout=200)
    assert len(expected) == 2 * (3 + 1) + 1  # the third step of an epoch has one batch
    run_ranks(2, by_trainer, True, output, 2, SPLIT, changed, 4, timeout=200)
    [refused, _] = run_ranks(2, by_trainer, True, output, 4, SPLIT, changed, None, True, timeout=200)
    assert "checkpoint-4 was saved with 16 samples in a step, and 2 ranks now take 8" in refused
    mesh = {"mesh": "dp=2,tp=2", "search": "propagation"}
    for losses in run_ranks(4, by_trainer, True, output, 4, mesh, changed, None, True, timeout=200):
        del losses[5]  # the evaluation with which the Trainer that was stopped has ended its epoch
        assert losses == pytest.approx(expected, rel=0, abs=5e-6)
    [refused] = run_ranks(1, by_trainer, True, output, 1, {}, (), None, str(tmp_path / "alone/checkpoint-6"))
    assert "what was saved has no optimizer, or another Trainer saved it; begin from it by from_pretrained" in refused


def refused_arguments(output):
    import transformers

    from shardwright.training.integrations.huggingface import Trainer

    sw.init()
    found = []
    for changed in (
        {"average_tokens_across_devices": False}, {"label_smoothing_factor": 0.1},
        {"fsdp": True}, {"per_device_train_batch_size": 3}, {"max_steps": 2},
    ):  # fmt: skip
        arguments = {"report_to": [], "use_cpu": True, "save_strategy": "no", **changed}
        data = streamed(rows()) if "max_steps" in changed else rows()
        try:
            Trainer(family("llama").model(), transformers.TrainingArguments(output, **arguments), train_dataset=data)
        except UsageError as error:
            found.append(str(error))
    return found


def drawn(output):
    """What is said of batches that a collator draws, and of those that it does not."""
    import torch
    import transformers

    from shardwright.training.integrations.huggingface import Trainer

    def masked(samples):
        batch = transformers.default_data_collator(samples)
        return {**batch, "input_ids": batch["input_ids"] * torch.randint(0, 2, batch["input_ids"].shape)}

    transformers.logging.set_verbosity_error()
    sw.init()
    arguments = transformers.TrainingArguments(output, report_to=[], use_cpu=True, per_device_train_batch_size=4)
    said = []
    for collator in (masked, None):
        try:
            Trainer(
                family("llama").model(), arguments, train_dataset=rows(), data_collator=collator,
                parallelize={"mode": "data"},
            )  # fmt: skip
        except UsageError as error:
            said.append(str(error))
    return said


@needs_accelerate
@pytest.mark.slow
def test_ranks_that_would_draw_for_their_parts_of_batches_are_refused(tmp_path):
    for [refused] in run_ranks(2, drawn, str(tmp_path), timeout=100):
        assert refused.startswith("input_ids of a batch is drawn at random by the data collator or the dataset, which")
        assert "torch.Generator().manual_seed(index)" in refused


def streamed(samples):
    from torch.utils.data import IterableDataset

    class Streamed(IterableDataset):
        """Samples of which nobody knows how many there are."""

        def __iter__(self):
            yield from samples

    return Streamed()


def by_streams(ours, output, ranks):
    """The losses of the steps and of two evaluations, of streams that do not fill their last batch."""
    import torch
    import transformers

    from shardwright.training.integrations.huggingface import Trainer

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sw.init()
    data = rows()
    arguments = transformers.TrainingArguments(
        output, per_device_train_batch_size=ROWS // ranks, per_device_eval_batch_size=ROWS // ranks, max_steps=4,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", save_only_model=True, disable_tqdm=True,
        dataloader_drop_last=True,
    )  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = (Trainer if ours else transformers.Trainer)(
            family("llama").model(), arguments, train_dataset=streamed(data[: 3 * ROWS + ours]),
            eval_dataset={"a": data[:ROWS], "b": data[ROWS : 2 * ROWS]},
            data_collator=Collator(Tokenizer()),
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()
        some = trainer.evaluate(data[:ROWS])
    refused = ""
    if ours:
        trainer.save_model(f"{output}/saved")
        try:
            trainer.predict(data)
        except UsageError as error:
            refused = str(error)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return [*losses, evaluated["eval_a_loss"], evaluated["eval_b_loss"], some["eval_loss"]], refused


class Tokenizer:
    """As much of a tokenizer as saving asks for."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


class Collator:
    """A collator that alone has the tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __call__(self, samples):
        import transformers

        return transformers.default_data_collator(samples)


@needs_accelerate
@pytest.mark.slow
def test_streams_and_several_evaluations_lose_what_they_lose_on_one_device(tmp_path):
    [(expected, _)] = run_ranks(1, by_streams, False, str(tmp_path / "alone"), 1, timeout=200)
    assert len(expected) == 7
    for losses, refused in run_ranks(2, by_streams, True, str(tmp_path / "ranks"), 2, timeout=200):
        assert losses == pytest.approx(expected, rel=0, abs=5e-6)
        assert refused.startswith("Trainer.predict(...) is not served here")
    assert (tmp_path / "ranks" / "saved" / "tokenizer.json").exists()


@needs_accelerate
@pytest.mark.slow
def test_arguments_that_would_change_the_numbers_are_refused(tmp_path):
    found, _ = run_ranks(2, refused_arguments, str(tmp_path), timeout=100)
    counting, smoothing, fsdp, uneven, unknown = found
    assert counting.startswith(
        "TrainingArguments(average_tokens_across_devices=False) is not served here; leave it out"
    )
    assert smoothing.startswith("TrainingArguments(label_smoothing_factor=0.1) is not served here; smooth in")
    assert fsdp.startswith("TrainingArguments(fsdp=True) is not served here; leave it out")
    assert unknown.startswith("the training dataset has no length, and may not fill batches of 16")
    assert "type dataloader_drop_last=True" in unknown
    assert uneven.startswith("the training dataset has 40 samples, which do not fill batches of 6")
