"""Hugging Face folders: their weights under any layout give the logits of transformers, and are written again."""

import json
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from eight_layouts import LAYOUTS, PLACEMENTS
from hugging_face import MODELS, SEQ_LEN, VOCAB, make_model, require_transformers, save, wide
from safetensors.torch import load_file, save_file
from small_run import small_run, write_text
from thinned import thinned

from pipeloom.catalog.model_files import config_json
from pipeloom.checkpoint.checkpoint_folder import find_checkpoint, read_info
from pipeloom.cli import main
from pipeloom.config import CheckpointConfig, ModelConfig, OutputConfig, RunConfig, ScheduleConfig, TrainingConfig
from pipeloom.data.text import load_data
from pipeloom.data.tokenizer import ByteTokenizer, LibraryTokenizer
from pipeloom.errors import ConfigError, UserError
from pipeloom.execute.processes.workers import run_workers
from pipeloom.execute.processes.world import join_forked
from pipeloom.model import Transformer
from pipeloom.predict.describe import completed, with_model_sizes
from pipeloom.runs.run_folder import RunFolder
from pipeloom.training.checkpoints.boxes import Box
from pipeloom.training.conversions.export import export_weights
from pipeloom.training.pretrained import PretrainedWeights, check_init, origin_of, read_description
from pipeloom.training.run import train
from pipeloom.training.session import resolve
from pipeloom.training.trainer import Trainer
from pipeloom.workload.layout import Layout

SHARES = 4


def config_of(folder, pretrained, layout, placement=None):
    config = small_run(
        folder,
        model=ModelConfig(file=pretrained),
        layout=layout,
        schedule=ScheduleConfig(placement=placement),
        training=TrainingConfig(steps=1, validation_batches=0, sample_tokens=0, predict=False, dtype="float64"),
        checkpoint=CheckpointConfig(final="checkpoint", init=pretrained),
    )
    config, problems = with_model_sizes(replace(config, data=replace(config.data, seq_len=SEQ_LEN)))
    assert not problems
    return config


def logits(configs, tokens, rendezvous, rank, size):
    """Logits of every position on the last pipeline rank, for each of the runs."""
    world, found = join_forked(rendezvous, rank, size, "cpu", 60), []
    for config in configs:
        data = load_data(config.data, 0)
        trainer = Trainer(resolve(config, data), world, data, RunFolder(config.output.folder))
        rows = [trainer._pipeline.next_logits(tokens, index) for index in range(tokens.shape[1])]
        found.append(None if rows[0] is None else torch.stack(rows).numpy())
    world.leave()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    models = {name: make_model(name, torch.float64) for name in MODELS}
    return models, {name: save(model, folder / name) for name, model in models.items()}


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.long) for share in range(1, SHARES))])
def test_logits_are_those_of_transformers_under_every_layout(folders, tmp_path, share):
    """A share has every layout, and every family under some of them; the shares together have all pairs."""
    models, paths = folders
    tokens = torch.randint(VOCAB, (1, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), wide():
        expected = {name: model(tokens).logits[0] for name, model in models.items()}
    for size in (1, 2, 4):
        runs = [
            (name, config_of(tmp_path, path, layout, PLACEMENTS.get(key)))
            for place, (key, layout) in enumerate(LAYOUTS.items())
            for number, (name, path) in enumerate(paths.items())
            if layout.num_ranks == size and (place + number) % SHARES == share
        ]
        load_data(runs[0][1].data, 0)
        by_rank = run_workers(partial(logits, [config for _, config in runs], tokens), size)
        for number, (name, config) in enumerate(runs):
            last = [found[number] for found in by_rank if found[number] is not None]
            assert last, config.layout
            for one in last:
                whole = torch.from_numpy(one)
                assert (whole - expected[name]).abs().max() < 1e-10, (name, config.layout)


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of a llama folder that a test may damage."""
    return shutil.copytree(folders[1]["llama"], tmp_path / "llama")


def refusal(tmp_path, folder, capsys, *words):
    """The message of ``pipeloom train`` that starts from a folder; nothing else is written."""
    run = tmp_path / "run"
    words = ["--model.file", str(folder), "--checkpoint.init", str(folder), *words]
    words += ["--data.path", str(write_text(tmp_path)), "--data.seq_len", "8", "--data.tokenizer", "bytes"]
    words += ["--data.cache", str(tmp_path / "cache"), "--optimizer.lr", "0.01", "--training.steps", "1"]
    words += ["--optimizer.lr-warmup-steps", "0"]
    assert main(["train", *words, "--output.folder", str(run), "--layout.pp", "1", "--layout.loops", "1"]) == 2
    assert not run.exists()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.err


def rewrite(folder, change):
    """Change the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_all_tensors_that_differ_are_named_together(folder, tmp_path, capsys):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1].clone()

    rewrite(folder, change)
    message = refusal(tmp_path, folder, capsys)
    assert "it lacks model.norm.weight" in message
    assert "nothing here has the name of model.layers.0.self_attn.q_proj.bias" in message
    assert "it has another shape for lm_head.weight [259, 16] instead of [260, 16]" in message


def test_quantized_weights_are_refused(folder, tmp_path, capsys):
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}))
    assert "lm_head.weight has the type I8" in refusal(tmp_path, folder, capsys)


def test_pickles_are_refused(folder, tmp_path, capsys):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only pytorch_model.bin: pickles, which can run code" in refusal(tmp_path, folder, capsys)


def test_an_index_with_files_elsewhere_is_refused(folder, tmp_path, capsys):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "expected a weight_map from tensors to *.safetensors files of its folder" in refusal(
        tmp_path, folder, capsys
    )


@pytest.mark.parametrize("text", ["[1]", "{", '{"weight_map": {}}', '{"weight_map": [2]}'])
def test_an_index_that_is_none_is_refused(folder, tmp_path, capsys, text):
    (folder / "model.safetensors.index.json").write_text(text)
    assert f"cannot read {folder / 'model.safetensors.index.json'}: " in refusal(tmp_path, folder, capsys)


def test_an_index_that_does_not_list_the_tensors_of_its_files_is_refused(folder, tmp_path, capsys):
    names = sorted(load_file(folder / "model.safetensors"))
    places = dict.fromkeys([*names[1:], "model.more.weight"], "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    message = refusal(tmp_path, folder, capsys)
    assert "the files lack model.more.weight in model.safetensors" in message
    assert f"it does not list {names[0]} in model.safetensors" in message


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_no_numbers_are_refused_by_name(folders, tmp_path, value):
    folder = shutil.copytree(folders[1]["llama"], tmp_path / "wrong")
    config = resolved(config_of(tmp_path, folder, LAYOUTS["one rank"]))
    rewrite(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3].fill_(value))
    weights = PretrainedWeights(folder, config)
    name, values = "layers.1.feed_forward.up.weight", torch.zeros(1, 16, dtype=torch.float64)
    weights.read(name, Box((2, 0), (1, 16)), values)
    with pytest.raises(OSError, match=r"model\.layers\.1\.mlp\.up_proj\.weight of .* has values that are NaN or"):
        weights.read(name, Box((3, 0), (1, 16)), values)


def test_a_truncated_file_is_refused(folder, tmp_path, capsys):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    message = refusal(tmp_path, folder, capsys)
    assert f"cannot read the weights {file}: it is damaged or not complete (" in message
    assert "; download or copy it again" in message


def test_all_files_that_are_missing_or_damaged_are_named(folder, tmp_path, capsys):
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    places = {name: names[number % 3] for number, name in enumerate(load_file(folder / "model.safetensors"))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / names[1]).write_text("version https://git-lfs.github.com/spec/v1\n")
    message = refusal(tmp_path, folder, capsys)
    for name, reason in zip(names, ("there is no", "it is damaged", "there is no"), strict=True):
        assert f"cannot read the weights {folder / name}: {reason}" in message
    assert "; download or copy them again" in message


def test_a_model_of_other_sizes_is_refused(folder, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    table = json.loads((folder / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**table, "rms_norm_eps": 1e-4, "intermediate_size": 24}))
    message = refusal(tmp_path, folder, capsys, "--model.file", str(other))
    assert f"is of another model; set model.file to {folder}:" in message
    assert "model.ffn_size is 24, there 20" in message
    assert "model.norm_eps is 0.0001, there 1e-06" in message


def test_a_folder_without_a_model_is_refused(tmp_path, capsys, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    message = refusal(tmp_path, folder, capsys, "--checkpoint.init", str(empty))
    assert f"found no complete checkpoint in {empty}, and no config.json of a Hugging Face model" in message


def test_two_matrices_of_a_tied_model_must_be_equal(folders, tmp_path, capsys):
    folder = shutil.copytree(folders[1]["llama tied"], tmp_path / "tied")
    config = resolved(config_of(tmp_path, folder, LAYOUTS["one rank"]))
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    box, values = Box((3, 2), (2, 5)), torch.zeros(2, 5, dtype=torch.float64)
    PretrainedWeights(folder, config).read("embedding.tokens.weight", box, values)
    assert torch.equal(values, load_file(folder / "model.safetensors")["lm_head.weight"][3:5, 2:7])
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(
        OSError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight, but the model is tied"
    ):
        PretrainedWeights(folder, config).read("embedding.tokens.weight", box, values)


def resolved(config):
    return resolve(config, load_data(config.data, 0))


def test_files_of_the_model_without_head_and_with_old_buffers_are_read(folders, tmp_path):
    folder = shutil.copytree(folders[1]["gpt2"], tmp_path / "gpt2")
    before = load_file(folder / "model.safetensors")

    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    rewrite(folder, change)
    config = resolved(config_of(tmp_path, folder, LAYOUTS["one rank"]))
    values = torch.zeros(4, 3, dtype=torch.float64)
    PretrainedWeights(folder, config).read("layers.1.attention.key.weight", Box((2, 5), (4, 3)), values)
    assert torch.equal(values, before["transformer.h.1.attn.c_attn.weight"].T[16 + 2 : 16 + 6, 5:8])


def test_a_run_starts_from_the_weights_of_another_run(tmp_path):
    first = small_run(tmp_path, layout=Layout(pp=1, loops=2, num_microbatches=2, microbatch_size=1))
    first = replace(first, training=replace(first.training, predict=False, validation_batches=0, sample_tokens=0))
    train(replace(first, checkpoint=CheckpointConfig(final="checkpoint")), quiet=True)
    second = replace(
        first,
        layout=replace(first.layout, loops=1),
        output=replace(first.output, folder=tmp_path / "second"),
        optimizer=replace(first.optimizer, lr=1e-30, lr_warmup_steps=0),
        checkpoint=CheckpointConfig(final="checkpoint", init=tmp_path / "run"),
    )
    result = train(second, quiet=True)
    assert result.summary.steps == 3
    assert result.summary.tokens == 3 * 2 * 8
    found, expected = (
        export_weights(path, tmp_path / name)[0] for name, path in (("a", result.folder), ("b", tmp_path / "run"))
    )
    assert all(torch.equal(load_file(found)[name], one) for name, one in load_file(expected).items())
    shutil.rmtree(tmp_path / "run")
    # A run that resumes has its weights in its own checkpoint.
    again = replace(second, checkpoint=replace(second.checkpoint, resume=result.folder))
    other = replace(again, checkpoint=replace(again.checkpoint, init=result.folder))
    with pytest.raises(
        ConfigError, match=r"checkpoint\.init has no effect with checkpoint\.resume .* whose run began with"
    ):
        train(other, quiet=True)
    assert train(replace(again, training=replace(again.training, steps=4)), quiet=True).summary.steps == 4


NARROW = Layout(pp=2, loops=2, num_microbatches=2, microbatch_size=1)


def export_of(tmp_path, folder, name, **settings):
    """The Hugging Face folder of a run of one step that leaves the weights as they were."""
    config = config_of(tmp_path, folder, NARROW)
    training = replace(config.training, dtype="float32")
    data = replace(config.data, tokenizer="bytes")
    optimizer = replace(config.optimizer, lr=1e-30, lr_warmup_steps=0)
    output = replace(config.output, folder=tmp_path / f"run {name}")
    result = train(replace(config, data=data, training=training, optimizer=optimizer, output=output), quiet=True)
    return export_weights(result.folder, tmp_path / f"out {name}", format="hf", **settings)


@pytest.mark.parametrize("name", thinned(["llama", "gpt2", "gemma2", "gemma3"], 2))
def test_an_export_of_an_import_is_equal_byte_for_byte(tmp_path, name):
    model = make_model(name).to(torch.bfloat16)
    folder = save(model, tmp_path / name, max_shard_size="8KB" if name == "llama" else "5GB")
    files = export_of(tmp_path, folder, name)
    assert {file.name for file in files} == {
        *(file.name for file in folder.iterdir()),
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for file in folder.iterdir():
        assert (files[0].parent / file.name).read_bytes() == file.read_bytes(), file.name


def test_another_type_is_written_with_its_name(tmp_path):
    folder = save(make_model("llama"), tmp_path / "llama")
    files = export_of(tmp_path, folder, "narrow", dtype="bfloat16")
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, files[0].parent))
    assert after.pop("dtype") == "bfloat16"
    assert before.pop("dtype") == "float32"
    assert after == before
    assert {one.dtype for one in load_file(files[0]).values()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "is_written"), [("llama", True), ("qwen2", True), ("qwen3", False)])
def test_sequences_of_more_positions_than_the_folders_are_remarked_on_and_exported(tmp_path, name, is_written):
    folder = save(make_model(name), tmp_path / name)
    most = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    config = config_of(tmp_path, folder, LAYOUTS["one rank"])
    equal, longer = (replace(config, data=replace(config.data, seq_len=length)) for length in (most, most + 1))
    assert "positions" not in check_init(equal)
    message = check_init(longer)
    assert (
        f"was trained on {most} positions (max_position_embeddings), sequences have {most + 1}; an export has"
        in message
    )
    assert message.endswith(f"an export has {most + 1}") == is_written
    assert message.endswith(f"an export has {most}, from which its scaling of positions follows") == (not is_written)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "max_position_embeddings": SEQ_LEN - 1})
    )
    before = json.loads((folder / "config.json").read_text())
    after = json.loads((export_of(tmp_path, folder, name)[0].parent / "config.json").read_text())
    assert after == {**before, "max_position_embeddings": SEQ_LEN if is_written else SEQ_LEN - 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs with random weights, by family."""
    folder, found = tmp_path_factory.mktemp("trained"), {}
    for family in ("llama", "gpt2", "gemma2", "gemma3"):
        model = ModelConfig(family=family, num_layers=2, hidden_size=16, num_heads=4, tied=family != "llama")
        if family.startswith("gemma"):
            model = replace(model, window=3, query_pre_attn_scalar=9.0, logit_softcap=5.0)
        if family == "llama":
            model = replace(model, num_kv_heads=2, norm_eps=1e-6, rope_theta=5e5)
        output = OutputConfig(folder=folder / family)
        checkpoint = CheckpointConfig(final="checkpoint")
        training = TrainingConfig(steps=2, validation_batches=0, sample_tokens=0, predict=False)
        layout = Layout(pp=1, loops=2, num_microbatches=1, microbatch_size=1)
        config = small_run(folder, model=model, output=output, checkpoint=checkpoint, training=training, layout=layout)
        found[family] = train(config, quiet=True).folder
        if family == "llama":
            experts = replace(model, experts=3, expert_ffn=12)
            config = replace(config, model=experts, output=OutputConfig(folder=folder / "mixtral"))
            found["mixtral"] = train(config, quiet=True).folder
    return found


@pytest.mark.parametrize("family", thinned(["gpt2", "llama", "mixtral", "gemma3", "gemma2"], 2))
def test_transformers_loads_what_was_trained_here(trained, tmp_path, family):
    transformers = require_transformers()
    assert main(["export", str(trained[family]), str(tmp_path / "out"), "--format", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = load_file(export_weights(trained[family], tmp_path / "own")[0])
    config = read_info(find_checkpoint(trained[family])).model
    whole = Transformer(ModelConfig(**config), 8)
    whole.load_state_dict(ours)
    tokens = torch.randint(257, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (model(tokens).logits - whole(tokens)).abs().max() < 1e-5


def test_files_of_another_model_are_not_replaced(trained, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert main(["export", str(trained["llama"]), str(tmp_path), "--format", "hf"]) == 2
    assert f"{tmp_path / 'config.json'} is another file; choose another folder, or move it" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_a_model_without_an_architecture_is_refused():
    model = ModelConfig(family="gpt2", num_kv_heads=2).resolve(300)
    with pytest.raises(UserError, match="no architecture of Hugging Face that is supported here computes this model"):
        config_json(model, 8)


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree["texts"].update({"../outside": "x"}),
        lambda tree: tree["tensors"].update({"/etc/x": {}}),
        lambda tree: tree["tensors"]["model.safetensors"].update({"lm_head.weight": "I8"}),
        lambda tree: tree["texts"].pop("config.json"),
        lambda tree: tree.update({"about": 1}),
    ],
)
def test_a_description_that_names_other_files_is_refused(folders, change):
    tree = json.loads(origin_of(folders[1]["llama"], ByteTokenizer().files()))
    assert read_description(json.dumps(tree)).texts.keys() == {"config.json", "generation_config.json"}
    change(tree)
    with pytest.raises(UserError, match=r"pretrained\.json of the checkpoint does not describe"):
        read_description(json.dumps(tree))


def test_a_folder_stays_the_model_beside_settings_of_the_run_and_a_contradicting_one_is_named_alone(folders):
    def start(name, **settings):
        run = RunConfig(model=ModelConfig(**settings), checkpoint=CheckpointConfig(init=folders[1][name]))
        return completed(run, lambda *_, **__: [])

    for settings in ({"balance": "bias"}, {"balance": "none"}, {"expert_capacity": 1.5}, {"experts_per_token": 2}):
        found, problems = start("mixtral", **settings)
        assert not problems
        own = {
            name: value for name, value in settings.items() if name != "experts_per_token"
        }  # its value is the default
        assert found.model == replace(start("mixtral")[0].model, **own)
        assert (found.model.file, found.model.experts) == (folders[1]["mixtral"], 4)
    for name, found, wanted in (("norm_eps", 1e-2, "1e-06"), ("num_layers", 5, "4"), ("experts", 4, "unset")):
        _, problems = start("llama", **{name: found})
        of_folder = f"as in checkpoint.init {folders[1]['llama']}"
        assert problems == [f"model.{name} must be {wanted}, {of_folder}, found {found}; leave model.{name} out"]
    named, problems = completed(
        RunConfig(model=ModelConfig(preset="gpt-52b"), checkpoint=CheckpointConfig(init=folders[1]["llama"])),
        lambda *_, **__: [],
    )
    assert (named.model.file, problems) == (None, [])


def test_the_folders_tokenizer_is_the_runs_and_is_exported_with_its_settings(tmp_path):
    folder = save(make_model("llama"), tmp_path / "llama")
    tokenizer = LibraryTokenizer.train([b"some text of the model's own tokenizer"], 260)
    for name, text in tokenizer.files().items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "model_max_length": 64}')
    config = config_of(tmp_path, folder, LAYOUTS["one rank"])
    assert completed(config, lambda *_, **__: [])[0].data.tokenizer == folder
    bare, problems = completed(RunConfig(checkpoint=CheckpointConfig(init=folder)), lambda *_, **__: [])
    assert not problems
    assert (bare.model.file, bare.model.num_layers, bare.data.tokenizer) == (folder, 4, folder)
    config = replace(
        config,
        optimizer=replace(config.optimizer, lr=0.01, lr_warmup_steps=0),
        output=replace(config.output, folder=tmp_path / "run"),
    )
    out = export_weights(train(config, quiet=True).folder, tmp_path / "out", format="hf")[0].parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_text() == (folder / name).read_text()
