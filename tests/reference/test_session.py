"""The step protocol: requests do not see each other, refusals come first, drafts leave no trace.

Also what a module of this model owes its users: gradients, compilation, construction on the meta device, casts.
"""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from weights import FLOAT64_BOUND, drawn_ids, error, one_shot, random_model, small

from reference.config import TextConfig, released, tiny
from reference.errors import CacheError, ConfigError, TokenIdError
from reference.layers.moe import Router
from reference.numerics import Numerics
from reference.probe import Recorder, listening
from reference.session import Session, StepItem
from reference.text import TextModel

CONFIG = small(sliding_window_size=5, index_topk=6)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return random_model(CONFIG).requires_grad_(False)


def step(session: Session, request: str, *token_ids: int, kind: str = "prefill") -> Tensor:
    return session.step([StepItem(request, token_ids, kind)])[request]


# Requests


def test_interleaved_requests_equal_each_alone(model):
    """Owes bytes. Requests join, grow in chunks of their own, are taken back and leave, in the same steps."""
    ids = {name: drawn_ids(CONFIG, 18, seed) for seed, name in enumerate("abc")}
    starts = {"a": 0, "b": 1, "c": 3}
    chunks = {"a": 3, "b": 1, "c": 2}

    def run(names: str) -> dict[str, list[Tensor]]:
        session, rows = Session(model), {name: [] for name in names}
        for round_ in range(9):
            present = [name for name in names if starts[name] <= round_ and (name, round_) != ("b", 8)]
            items = []
            for name in present:
                begin = chunks[name] * (round_ - starts[name])
                items.append(StepItem(name, ids[name][begin : begin + chunks[name]], "prefill"))
            items = [item for item in items if item.token_ids]
            for name, new_rows in session.step(items).items():
                rows[name].append(new_rows)
            if round_ == 4:
                for name in present:
                    rows[name].append(session.draft(name, 11, 2))
                    session.truncate(name, session.length(name) - 1)
        return rows

    together = run("abc")
    for name in "abc":
        (alone,) = run(name).values()
        assert len(alone) >= 6
        assert all(torch.equal(*pair) for pair in zip(together[name], alone, strict=True))


def test_the_order_of_items_in_a_step_does_not_matter(model):
    items = [StepItem("a", (1, 2, 3), "prefill"), StepItem("b", (4,), "decode")]
    forward, backward = Session(model).step(items), Session(model).step(items[::-1])
    assert list(forward) == ["a", "b"]
    assert list(backward) == ["b", "a"]
    assert all(torch.equal(forward[name], backward[name]) for name in "ab")


def test_logits_have_a_row_for_each_new_token_in_the_models_dtype(model):
    session = Session(model)
    assert step(session, "a", 1, 2, 3).shape == (3, CONFIG.vocab_size)
    rows = step(session, "a", 4)
    assert rows.shape == (1, CONFIG.vocab_size)
    assert rows.dtype == torch.float64
    assert session.length("a") == 4


def test_a_freed_name_can_be_used_again(model):
    session = Session(model)
    step(session, "a", 1, 2, 3)
    session.free("a")
    assert torch.equal(step(session, "a", 4, 5), one_shot(model, (4, 5)))


def test_observed_rows_carry_request_absolute_positions_and_kind(model):
    session, recorder = Session(model), Recorder(("final_norm", "mtp.*.normed", "cache.1.k_rope"))
    with listening(recorder):
        step(session, "a", *range(9))
        step(session, "b", 3, kind="decode")
        step(session, "a", 7, 8, kind="verify")
        session.draft("a", 5, 2)
    seen = [(o.name, o.rows.request, o.rows.positions.tolist(), o.rows.kind) for o in recorder.observations]
    assert seen == [
        ("final_norm", "a", [0, 1, 2, 3, 4, 5, 6, 7, 8], "prefill"),
        ("cache.1.k_rope", "a", [0, 1, 2, 3, 4, 5, 6, 7, 8], "prefill"),
        ("final_norm", "b", [0], "decode"),
        ("cache.1.k_rope", "b", [0], "decode"),
        ("final_norm", "a", [9, 10], "verify"),
        ("cache.1.k_rope", "a", [9, 10], "verify"),
        ("mtp.0.normed", "a", list(range(11)), "draft"),
        ("mtp.1.normed", "a", [11], "draft"),
    ]
    assert all(len(o.value) == len(o.rows.positions) for o in recorder.observations)


def test_being_observed_changes_no_bit(model):
    ids = drawn_ids(CONFIG, 12)
    with listening(Recorder()):
        observed = one_shot(model, ids)
    assert torch.equal(observed, one_shot(model, ids))


# Refusals


@pytest.mark.parametrize(
    ("items", "refusal", "message"),
    [
        ([StepItem("a", (1,), "decode"), StepItem("a", (2,), "decode")], CacheError, "'a'.*one item"),
        ([StepItem("a", (), "prefill")], CacheError, "'a'.*at least one token"),
        ([StepItem("b", (1,) * 10, "prefill")], CacheError, "'b' would hold 10 tokens; max_length is 9"),
        ([StepItem("a", (1,) * 7, "prefill")], CacheError, "'a' would hold 10 tokens; max_length is 9"),
        ([StepItem("b", (0, 193), "prefill")], TokenIdError, r"'b': token id 193 .*\(0 to 192\)"),
        ([StepItem("a", (-1,), "decode")], TokenIdError, r"'a': token id -1 .*\(0 to 192\)"),
        ([StepItem("b", (0, 1.5), "prefill")], TokenIdError, r"'b': token id 1\.5 .*\(0 to 192\)"),
    ],
)
def test_a_refused_step_has_run_nothing(model, items, refusal, message):
    """Also for the good items in front of the bad one."""
    session = Session(model, max_length=9)
    step(session, "a", 1, 2, 3)
    recorder = Recorder()
    with listening(recorder), pytest.raises(refusal, match=message):
        session.step([StepItem("good", (1, 2), "prefill"), *items])
    assert recorder.observations == []
    assert session.length("a") == 3
    with pytest.raises(CacheError, match=r"no request 'good'; there are \['a'\]"):
        session.length("good")
    with pytest.raises(CacheError, match="no request 'b'"):
        session.length("b")


def test_a_request_may_grow_to_exactly_its_max_length(model):
    session, ids = Session(model, max_length=9), drawn_ids(CONFIG, 9)
    assert torch.equal(step(session, "a", *ids), one_shot(model, ids))


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.truncate("x", 0),
        lambda session: session.fork("x", "y"),
        lambda session: session.free("x"),
        lambda session: session.draft("x", 1, 1),
        lambda session: session.length("x"),
    ],
    ids=["truncate", "fork", "free", "draft", "length"],
)
def test_an_unknown_request_is_refused_by_name(model, call):
    session = Session(model)
    step(session, "a", 1)
    with pytest.raises(CacheError, match=r"no request 'x'; there are \['a'\]"):
        call(session)


def test_a_fork_to_an_existing_name_is_refused(model):
    session = Session(model)
    step(session, "a", 1)
    step(session, "b", 2)
    with pytest.raises(CacheError, match="cannot fork to 'b': a request of that name exists"):
        session.fork("a", "b")
    assert session.request("b").token_ids == [2]


@pytest.mark.parametrize("depth", [0, 5])
def test_a_draft_deeper_than_the_session_allows_is_refused(model, depth):
    session = Session(model, max_draft_tokens=4)
    step(session, "a", 1)
    with pytest.raises(CacheError, match=f"cannot draft {depth} tokens for 'a'.*max_draft_tokens = 4"):
        session.draft("a", 1, depth)


def test_a_draft_without_a_draft_layer_is_refused():
    model = random_model(dataclasses.replace(CONFIG, num_nextn_predict_layers=0))
    session = Session(model)
    step(session, "a", 1)
    with pytest.raises(CacheError, match="needs a model with a draft layer"):
        session.draft("a", 1, 1)


def test_c33_more_than_one_draft_layer_is_refused_with_the_way_out():
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=r"num_nextn_predict_layers is 3, but NOTE has one.*set it to 1.*any depth"),
    ):
        TextModel(dataclasses.replace(CONFIG, num_nextn_predict_layers=3))


@pytest.mark.parametrize("token_id", [-1, 193])
def test_ids_outside_of_the_vocabulary_never_index_a_table(model, token_id):
    with pytest.raises(TokenIdError, match=f"token 1 has id {token_id}; ids must be 0 to 192"):
        model.embed(torch.tensor([0, token_id]))
    session = Session(model)
    step(session, "a", 1, 2)
    with pytest.raises(TokenIdError, match=rf"'a'.* {token_id} .*0 to 192"):
        session.draft("a", token_id, 2)


def test_a_refused_forced_draft_leaves_the_request_as_it_was(model):
    session = Session(model)
    step(session, "a", 1, 2, 3)
    # The first draft runs all rows at once; from the second on only the newest, and bytes are owed.
    session.draft("a", 7, 2)
    expected = session.draft("a", 7, 2)
    with pytest.raises(TokenIdError):
        session.draft("a", 9, 2, forced=(193,))
    assert torch.equal(session.draft("a", 7, 2), expected)


def test_a_draft_of_an_emptied_request_is_refused_by_name(model):
    session = Session(model)
    step(session, "a", 1, 2, 3)
    session.truncate("a", 0)
    with pytest.raises(CacheError, match="'a'"):
        session.draft("a", 7, 1)


# Drafts


def test_drafting_twice_gives_the_same_and_leaves_the_target_alone(model):
    """The first draft runs all rows at once and owes a bound; later ones run only the newest, and owe bytes."""
    session, plain, ids = Session(model), Session(model), drawn_ids(CONFIG, 11)
    for each in (session, plain):
        step(each, "a", *ids)
    first, second = session.draft("a", 7, 4), session.draft("a", 7, 4)
    assert first.shape == (4, CONFIG.vocab_size)
    assert error(second, first) <= FLOAT64_BOUND
    assert error(session.draft("a", 8, 3), first[:3]) > 1e-2
    assert torch.equal(session.draft("a", 7, 4), second)
    assert torch.equal(step(session, "a", 7), step(plain, "a", 7))


def warm_session(model: TextModel) -> Session:
    """A request "a" of eleven tokens whose draft layer has caught up, so that every draft runs the same shapes."""
    session = Session(model)
    step(session, "a", *drawn_ids(CONFIG, 11))
    session.draft("a", 1, 1)
    return session


def test_a_shallower_draft_is_the_beginning_of_a_deeper_one(model):
    """Owes bytes."""
    session = warm_session(model)
    deep = session.draft("a", 7, 4)
    assert all(torch.equal(session.draft("a", 7, depth), deep[:depth]) for depth in (1, 2, 3))


def test_forcing_the_best_tokens_changes_nothing_and_forcing_others_changes_what_follows(model):
    """Owes bytes."""
    session = warm_session(model)
    free = session.draft("a", 7, 3)
    best = free.argmax(-1).tolist()
    assert torch.equal(session.draft("a", 7, 3, forced=best), free)
    assert torch.equal(session.draft("a", 7, 3, forced=best[:1]), free)
    forced = session.draft("a", 7, 3, forced=[(best[0] + 1) % CONFIG.vocab_size])
    assert torch.equal(forced[0], free[0])
    assert error(forced[1], free[1]) > 1e-2


def test_a_draft_equals_the_draft_layer_run_on_the_whole_sequence(model):
    """Owes a bound: rows of the draft layer from the definition, shifted tokens beside the target's hidden states."""
    ids, next_token, forced = drawn_ids(CONFIG, 11), 7, 12
    session = Session(model)
    step(session, "a", *ids[:4])
    session.draft("a", ids[4], 2)
    step(session, "a", *ids[4:])
    drafted = session.draft("a", next_token, 2, forced=(forced,))

    cache = model.new_cache()
    hidden_TD = model.hidden(model.embed(torch.tensor(ids)), cache)
    normed_TD, logits_TW = model.draft_step(0, torch.tensor([*ids[1:], next_token]), hidden_TD, cache)
    _, more_TW = model.draft_step(1, torch.tensor([forced]), normed_TD[-1:], cache)
    assert error(drafted, torch.stack((logits_TW[-1], more_TW[-1]))) <= FLOAT64_BOUND


def test_equal_draft_logits_go_to_the_lower_id(model):
    tied = random_model(CONFIG).requires_grad_(False)
    tied.lm_head.weight.zero_()
    session, forced = Session(tied), Session(tied)
    for each in (session, forced):
        step(each, "a", 1, 2)
    recorders = Recorder(("mtp.1.eh_input",)), Recorder(("mtp.1.eh_input",))
    with listening(recorders[0]):
        session.draft("a", 3, 2)
    with listening(recorders[1]):
        forced.draft("a", 3, 2, forced=(0,))
    assert torch.equal(recorders[0].values("mtp.1.eh_input")[0], recorders[1].values("mtp.1.eh_input")[0])


# Gradients, compilation, construction, casts


def loss_of(model: TextModel, ids: tuple[int, ...]) -> Tensor:
    """Smooth in every logit of the target and of two draft steps, through a cache in three chunks."""
    session = Session(model)
    rows = [step(session, "a", *chunk) for chunk in (ids[:20], ids[20:21], ids[21:])]
    rows.append(session.draft("a", 5, 2, forced=(6,)))
    return torch.cat(rows).pow(2).mean()


def with_every_expert_in_use(config: TextConfig) -> TextModel:
    """Without correction biases the random router leaves no expert out for long."""
    model = random_model(config)
    for router in routers(model):
        router.e_score_correction_bias.data.zero_()
    return model


def test_gradients_reach_every_parameter_but_the_indexer_and_the_router_bias():
    model = with_every_expert_in_use(tiny().text)
    loss_of(model, drawn_ids(model.config, 60)).backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {
        name for name, _ in model.named_parameters() if ".indexer." in name or name.endswith("correction_bias")
    }
    for name, parameter in model.named_parameters():
        if name not in without:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name


def test_what_the_indexer_caches_carries_no_graph():
    """A cached latent does, so that a loss reaches the tokens before it; an index key would only keep memory alive."""
    session = Session(random_model(CONFIG))
    step(session, "a", 1, 2, 3)
    tensors = session.request("a").cache.layers[0].tensors()
    assert {name: tensor.requires_grad for name, tensor in tensors.items()} == {
        "kv_latent": True,
        "k_rope": True,
        "index_key": False,
    }


def test_gradients_agree_with_finite_differences():
    """Central differences of step h err by about h², plus the loss's own rounding (1e-16) over h."""
    model, h = with_every_expert_in_use(CONFIG), 1e-5
    ids = drawn_ids(CONFIG, 24)
    loss_of(model, ids).backward()
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.0.self_attn.k_rope_only_layernorm.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.1.self_attn.g_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.mlp.experts.3.down_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.mtp.embed_tokens.weight",
        "lm_head.weight",
    ):
        parameter = model.get_parameter(name)
        direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        expected = float((parameter.grad * direction).sum())
        with torch.no_grad():
            losses = []
            for sign in (1, -1):
                parameter += sign * h * direction
                losses.append(float(loss_of(model, ids)))
                parameter -= sign * h * direction
        assert (losses[0] - losses[1]) / (2 * h) == pytest.approx(expected, rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("layer", [0, 1])
def test_a_compiled_layer_equals_the_eager_one(layer):
    """Owes bytes: backend "eager" runs the captured operations as they are. Two steps, so that the cache is read."""
    model = random_model(dataclasses.replace(CONFIG, n_routed_experts=4)).requires_grad_(False)
    eager = model.model.layers[layer]
    compiled = torch.compile(eager, backend="eager")
    x_TD = torch.randn(9, CONFIG.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    caches = [model.new_cache(2).layers[layer] for _ in range(2)]
    for rows in (slice(0, 6), slice(6, 9)):
        assert torch.equal(compiled(x_TD[rows], caches[0]), eager(x_TD[rows], caches[1]))
    for name, tensor in caches[1].tensors().items():
        assert torch.equal(caches[0].tensors()[name].nan_to_num(1e9), tensor.nan_to_num(1e9))


def test_the_released_model_is_built_on_the_meta_device_without_memory():
    with torch.device("meta"):
        model = TextModel(released().text)
    tensors = list(model.state_dict().values())
    assert all(tensor.is_meta for tensor in tensors)
    assert sum(tensor.numel() for tensor in tensors) == 279_551_718_016 + 11_520 + 1_134_193_728


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


BIASES = torch.linspace(6.80, 7.05, 256)


def router_with_close_biases() -> Router:
    """C21: 256 float32 biases between 6.80 and 7.05, which are 9 different values in bfloat16."""
    router = Router(dataclasses.replace(CONFIG, n_routed_experts=256), Numerics())
    router.e_score_correction_bias.data = BIASES.clone()
    return router


@pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.to(torch.bfloat16),
        lambda module: module.bfloat16(),
        lambda module: module.half(),
        lambda module: module.type(torch.bfloat16),
        lambda module: module.to("cpu", torch.float16),
        lambda module: nn.Sequential(module).to(torch.bfloat16)[0],
        lambda module: module.bfloat16().float(),
    ],
    ids=["to", "bfloat16", "half", "type", "device_and_dtype", "from_above", "there_and_back"],
)
def test_c21_the_correction_bias_stays_float32_under_every_cast(cast):
    assert len(BIASES.to(torch.bfloat16).unique()) == 9
    router = cast(router_with_close_biases())
    assert router.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(router.e_score_correction_bias, BIASES)


def test_c21_the_correction_bias_follows_to_float64():
    router = router_with_close_biases().double()
    assert router.e_score_correction_bias.dtype == torch.float64
    assert torch.equal(router.e_score_correction_bias, BIASES.double())


def test_c21_a_float64_model_cast_to_bfloat16_has_float32_biases():
    assert router_with_close_biases().double().bfloat16().e_score_correction_bias.dtype == torch.float32


def test_c21_a_cast_model_chooses_with_all_values_of_the_bias():
    """The choice of a bfloat16 model is the one of its float32 biases, not of the 9 that bfloat16 would leave."""
    model = random_model(CONFIG, dtype=torch.bfloat16)
    assert {router.e_score_correction_bias.dtype for router in routers(model)} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if "correction_bias" not in name} == {torch.bfloat16}
    router = router_with_close_biases().bfloat16()
    router.weight.data.zero_()
    ids_TK, _ = router(torch.zeros(1, CONFIG.hidden_size, dtype=torch.bfloat16))
    assert set(ids_TK[0].tolist()) == {253, 254, 255}


def test_the_bias_moves_with_its_module():
    assert router_with_close_biases().to("meta").e_score_correction_bias.is_meta


def test_c21_a_model_built_under_a_bfloat16_default_has_float32_biases():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = TextModel(CONFIG)
    finally:
        torch.set_default_dtype(before)
    assert {router.e_score_correction_bias.dtype for router in routers(model)} == {torch.float32}
