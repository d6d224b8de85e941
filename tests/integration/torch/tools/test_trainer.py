"""transformers.Trainer: a small GPT-2, trained, evaluated and saved over NetStorm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torch.tools.training import Trained, assert_same_training, installed, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), installed("transformers.Trainer", "transformers")]

TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

if backend == "netstorm":
    dist.init_process_group("netstorm", timeout=deadline)

class Counting(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}

set_seed(7)
model = GPT2LMHeadModel(GPT2Config(
    vocab_size=32, n_positions=16, n_embd=32, n_layer=2, n_head=2,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=str(folder / "saved"),
        use_cpu=True,
        ddp_backend=None if backend == "netstorm" else backend,
        max_steps=12,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="steps",
        save_steps=6,
        report_to="none",
        disable_tqdm=True,
        seed=7,
    ),
    train_dataset=Counting(90),
    eval_dataset=Counting(21),
)
trainer.train()
assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
predicted = trainer.predict(Counting(21)).predictions
logged = trainer.state.log_history
report(
    trainer.model,
    [entry[name] for entry in logged for name in ("loss", "eval_loss") if name in entry],
    predictions=len(predicted),
    saved=files(folder / "saved"),
)
"""


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("gloo"), TRAINER, "gloo")


@pytest.mark.parametrize("way", ["netstorm's group, created first", "gloo, which means netstorm"])
def test_the_trainer_trains_over_netstorm_as_over_gloo(way: str, over_gloo: Trained, tmp_path: Path) -> None:
    if way.startswith("netstorm"):
        trained = train(tmp_path, TRAINER, "netstorm")
    else:
        trained = train(tmp_path, TRAINER, "gloo", NETSTORM_TORCH_BACKENDS="gloo")
    assert_same_training(trained, over_gloo)
    for report in trained.reports:
        assert len(report["losses"]) == 12 + 2
        assert report["predictions"] == 21
        assert report["saved"] == ["checkpoint-12", "checkpoint-6"]
