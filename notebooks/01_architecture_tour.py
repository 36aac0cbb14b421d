# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One token's way through NOTE
#
# We follow one token, the last of a prompt of twenty, through the model: attention in two geometries, the indexer, the
# window, the gate, the experts, the caches and the draft layer. The model is `tiny()`: six layers, every part that the
# released model has, and no two sizes alike. Where the real sizes matter they stand beside the small ones.
#
# Everything runs in float64, so that a claim can be checked to the last digit. After each claim comes a cell that
# asserts it.
#
# Letters at the end of a name are its dims: `T` tokens, `S` keys, `D` model width, `H` heads, `N` nope lanes, `R` rope
# lanes, `Q` query latent, `C` key/value latent, `V` value lanes, `E` experts, `K` chosen, `P` pairs of lanes, `I`
# index heads, `J` index lanes, `W` vocabulary. `x[t]` without a letter is our token's row.

# %%
import copy
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

from reference.checkpoint import synthetic_tensors
from reference.config import released, tiny
from reference.layers.mla import in_window
from reference.layers.rope import rotate_halves, rotate_neighbours
from reference.numerics import Numerics
from reference.probe import Recorder, concatenated, listening
from reference.session import Session, StepItem
from reference.text import TextModel

torch.set_num_threads(1)
torch.set_printoptions(precision=3, linewidth=110)


# %%
config = tiny()
text, big = config.text, released().text
weights = dict(synthetic_tensors(config))


def built(numerics: Numerics) -> TextModel:
    model = TextModel(text, numerics)
    model.load_state_dict(weights)
    return model.double().requires_grad_(False)


model = built(Numerics())

# %% [markdown]
# ## 1. Running it, and looking inside
#
# The model names its intermediate values with `probe`. A `Recorder` that listens gets a copy of each. `seen` holds
# them by name, one row a token; our token is row `t`.

# %%
prompt = tuple(range(20, 40))
t = len(prompt) - 1
session, recorder = Session(model), Recorder()
with listening(recorder):
    logits_TW = session.step([StepItem("a", prompt, "prefill")])["a"]
seen = concatenated(recorder.observations)
print(len(seen), "named tensors, for example")
for name in ("embeddings", "layers.0.attn.q_latent", "layers.0.attn.core", "layers.5.output", "logits"):
    print(f"  {name:24} {tuple(seen[name].shape)}")

assert logits_TW.shape == (len(prompt), text.vocab_size)

# %% [markdown]
# The embedding is a plain lookup: no factor on it.

# %%
assert torch.equal(seen["embeddings"][t], model.model.embed_tokens.weight[prompt[t]])

# %% [markdown]
# A layer adds two things to the residual stream, and changes nothing else: what attention found, and what the
# feed-forward part made of it.

# %%
for layer in range(text.num_hidden_layers):
    at = f"layers.{layer}."
    added = seen[at + "attn.output"] + seen[at + "ffn.output"]
    torch.testing.assert_close(seen[at + "output"], seen[at + "input"] + added)

# %% [markdown]
# ## 2. The schedule: two kinds of layer
#
# Layers 0 and 1 are full, then every fourth; the others are sliding. Layer 0 has a dense feed-forward part, all later
# ones have experts. (`F` full, `s` sliding; the draft layer is one more sliding layer with a dense part.)

# %%
for name, sizes in (("tiny", text), ("released", big)):
    print(f"{name:9}", "".join("F" if sizes.is_full(layer) else "s" for layer in range(sizes.num_hidden_layers)))

full_layers = [layer for layer in range(big.num_hidden_layers) if big.is_full(layer)]
assert full_layers == [layer for layer in range(46) if layer < 2 or layer % 4 == 1]
assert (len(full_layers), big.num_hidden_layers - len(full_layers)) == (13, 33)
assert [big.is_moe(layer) for layer in (0, 1, 45, 46)] == [False, True, True, False]
assert not big.is_full(46)

# %% [markdown]
# ## 3. Two geometries
#
# A sliding layer is not a full layer with a window. It has its own number of heads, ranks, head widths and RoPE base.
# Beware of two neighbours: the softmax scale comes from the width of an *expanded* head, `N + R`, never from the
# cached row, `C + R`.

# %%
fields = (
    ("num_attention_heads", "H"),
    ("q_lora_rank", "Q"),
    ("kv_lora_rank", "C"),
    ("qk_nope_head_dim", "N"),
    ("qk_rope_head_dim", "R"),
    ("v_head_dim", "V"),
    ("qk_head_dim", "N + R"),
    ("latent_row", "C + R"),
    ("rope_theta", "theta"),
)
print(f"{'':28}{'tiny full':>11}{'sliding':>11}{'released full':>15}{'sliding':>11}")
for field, letter in fields:
    row = [getattr(geometry, field) for geometry in (text.full, text.sliding, big.full, big.sliding)]
    print(f"{field:22}{letter:6}{row[0]:>11g}{row[1]:>11g}{row[2]:>15g}{row[3]:>11g}")

assert big.full.softmax_scale == 192**-0.5
assert big.sliding.softmax_scale == 256**-0.5
# In the tiny model no two of these are alike, so that mixing them up cannot go unseen.
assert all(getattr(text.full, field) != getattr(text.sliding, field) for field, _ in fields)

# %% [markdown]
# The shapes of our token's row say the same. Layer 0 is full, layer 2 is sliding.

# %%
for layer in (0, 2):
    print(f"layer {layer}, {text.layer_types[layer]}")
    for name in ("input", "q_latent", "q_nope", "q_rope", "kv_latent", "k_rope", "core", "gate", "output"):
        print(f"  attn.{name:10} {tuple(seen[f'layers.{layer}.attn.{name}'][t].shape)}")
    geometry = text.geometry(layer)
    H, N, V = geometry.num_attention_heads, geometry.qk_nope_head_dim, geometry.v_head_dim
    assert seen[f"layers.{layer}.attn.q_nope"][t].shape == (H, N)
    assert seen[f"layers.{layer}.attn.core"][t].shape == (H, V)
    assert seen[f"layers.{layer}.attn.k_rope"][t].shape == (geometry.qk_rope_head_dim,)  # one for all heads

# %% [markdown]
# ## 4. Latents, and a factor that must come after the norm
#
# Queries and keys pass through a narrow latent. Each latent is normed and then multiplied by `sqrt(D / rank)`: in the
# released model sqrt(5) for queries, sqrt(10) for the keys of full layers, sqrt(5) for those of sliding layers.
#
# So without the norm's own weight the latent's root mean square is that factor, or a little less: the epsilon inside
# the norm takes its share of small rows.


# %%
def rms(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1).sqrt()


for layer in (0, 2):
    attention, at = model.model.layers[layer].self_attn, f"layers.{layer}.attn."
    for name, norm in (("q_latent", attention.q_a_layernorm), ("kv_latent", attention.kv_a_layernorm)):
        factor = (text.hidden_size / len(norm.weight)) ** 0.5
        found = rms(seen[at + name] / norm.weight)[t]
        print(f"layer {layer} {name:10} sqrt(D / rank) = {factor:.4f}   found {found:.4f}")
        assert 0.95 * factor < found < factor

assert (big.hidden_size / big.full.kv_lora_rank) ** 0.5 == 10**0.5
assert (big.hidden_size / big.sliding.kv_lora_rank) ** 0.5 == 5**0.5

# %% [markdown]
# Put before the norm, the same factor would do nothing: a norm forgets the scale of its input. (Not to the last digit,
# because of the epsilon inside.)

# %%
attention = model.model.layers[0].self_attn
latent_TQ = attention.q_a_proj(seen["layers.0.attn.input"])
once, tenfold = attention.q_a_layernorm(latent_TQ), attention.q_a_layernorm(10.0 * latent_TQ)
print(f"input 10 times larger, output moves by {(rms(tenfold - once) / rms(once)).max():.1%}")
assert (rms(tenfold - once) / rms(once)).max() < 0.05

# %% [markdown]
# ## 5. The shared rope key: normed, then rotated
#
# Next to the latent there is one rope key of `R` lanes, shared by all heads. It has a norm of its own, which
# DeepSeek's attention lacks, and no rescale.

# %%
norm = attention.k_rope_only_layernorm
unrotated_TR, rotated_TR = seen["layers.0.attn.k_rope_unrotated"], seen["layers.0.attn.k_rope"]
print("rms without the norm's weight:", f"{rms(unrotated_TR / norm.weight)[t]:.4f}")
assert 0.95 < rms(unrotated_TR / norm.weight)[t] < 1.0

# %% [markdown]
# RoPE turns each pair of neighbouring lanes `(2j, 2j + 1)` by an angle proportional to the position. A turn keeps the
# length of the pair. At position 0 nothing turns.

# %%
pair_lengths = [x.unflatten(-1, (-1, 2)).norm(dim=-1) for x in (unrotated_TR, rotated_TR)]
torch.testing.assert_close(*pair_lengths)
assert torch.equal(rotated_TR[0], unrotated_TR[0])
assert not torch.allclose(rotated_TR[t], unrotated_TR[t])

# %% [markdown]
# Related models pair lane `j` with lane `j + R/2`. At position 0 both conventions agree, so a test with a single token
# cannot tell them apart; from position 1 on they differ.

# %%
x_R = unrotated_TR[t]
for position in (0, 1):
    angle_P = position * torch.linspace(1.0, 0.1, len(x_R) // 2, dtype=torch.float64)
    same = torch.equal(
        rotate_neighbours(x_R, angle_P.cos(), angle_P.sin()), rotate_halves(x_R, angle_P.cos(), angle_P.sin())
    )
    print(f"position {position}: the two pairings agree: {same}")
    assert same == (position == 0)

# %% [markdown]
# What a query sees of a key depends on their distance only: shift both by the same number of places and their product
# stays.

# %%
q_R, k_R = seen["layers.0.attn.q_rope"][t, 0], x_R
products = []
for shift in (0, 5, 100):
    q_at, k_at = (attention.rope(x[None], torch.tensor([p + shift]))[0] for x, p in ((q_R, 9), (k_R, 4)))
    products.append(float(q_at @ k_at))
print("product at distance 5, shifted by 0, 5, 100:", [f"{product:.6f}" for product in products])
assert max(products) - min(products) < 1e-4 * max(map(abs, products))

# %% [markdown]
# ## 6. The indexer: which keys a full layer looks at
#
# A full layer attends to at most `index_topk` keys: 13 here, 2048 in the release. A small scorer ranks them:
#
#     score[t, s] = sum over index heads i of  w[t, i] * relu(J^-1/2 * <q[t, i], k[s]>)
#
# It has its own queries (from the query latent) and one small key a token. The head weights `w` are signed, so a score
# can be negative, and a key that no index head likes scores exactly zero.

# %%
at = "layers.1.attn.index."
scores_TS, selected_TK = seen[at + "scores"], seen[at + "selected"]
is_selected_TS = torch.zeros_like(scores_TS, dtype=torch.bool)
for row, keys in enumerate(selected_TK):
    is_selected_TS[row, keys[keys >= 0]] = True

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
image = left.imshow(scores_TS.masked_fill(scores_TS.isinf(), float("nan")), cmap="viridis")
figure.colorbar(image, ax=left)
left.set(title="index scores, layer 1", xlabel="key", ylabel="query")
right.imshow(is_selected_TS, cmap="Greys")
right.set(title=f"selected: the best {text.index_topk}", xlabel="key", ylabel="query")
plt.show()

# %% [markdown]
# While no more than `index_topk` keys are there, all are taken: the layer is plain causal attention. Behind that the
# best ones are taken, and only those up to the query itself.

# %%
for row in range(len(prompt)):
    assert is_selected_TS[row].sum() == min(text.index_topk, row + 1)
    assert not is_selected_TS[row, row + 1 :].any()
best = scores_TS[t].topk(text.index_topk).indices
assert set(best.tolist()) == set(selected_TK[t].tolist())
assert (seen[at + "head_weights"] < 0).any()
print("key positions that our token does not look at:", (~is_selected_TS[t]).nonzero().flatten().tolist())

# %% [markdown]
# The scores only rank. Make all index queries four times larger, and every score is exactly four times larger while
# the choice stays: a forgotten positive factor in here is invisible behind the indexer.

# %%
indexer = model.model.layers[1].self_attn.indexer
rows = indexer(seen["layers.1.attn.input"], seen["layers.1.attn.q_latent"], torch.arange(len(prompt)))
plain_TS = indexer.scores(rows.query_TIJ, rows.head_weights_TI, rows.key_TJ)
larger_TS = indexer.scores(4.0 * rows.query_TIJ, rows.head_weights_TI, rows.key_TJ)
assert torch.equal(larger_TS, 4.0 * plain_TS)

# %% [markdown]
# ## 7. The window: which keys a sliding layer looks at
#
# A sliding layer sees the last `sliding_window_size` keys, its own among them: 7 here, 513 in the release. The
# selection of a full layer (right) has holes, a window (left) has none.

# %%
positions_T = torch.arange(len(prompt))
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained")
left.imshow(in_window(positions_T, positions_T, text.sliding_window_size), cmap="Greys")
left.set(title=f"layer 2, sliding: window {text.sliding_window_size}", xlabel="key", ylabel="query")
right.imshow(is_selected_TS, cmap="Greys")
right.set(title=f"layer 1, full: best {text.index_topk}", xlabel="key", ylabel="query")
plt.show()

assert big.sliding_window_size == 513  # a key at distance 512 is seen, one at distance 513 is not

# %% [markdown]
# An experiment says the same without a mask: change token 0 in the input of layer 2 alone, and look which rows of its
# output notice. (By more than their last digits: those depend on which rows share a matrix product in an expert.)

# %%
layer_2, changed_TD = model.model.layers[2], seen["layers.2.input"].clone()
changed_TD[0] += 1.0
before_TD = layer_2(seen["layers.2.input"], model.new_cache().layers[2])
after_TD = layer_2(changed_TD, model.new_cache().layers[2])
noticed = (rms(after_TD - before_TD) > 1e-12 * rms(before_TD)).nonzero().flatten().tolist()
print("rows that notice a change of token 0:", noticed)
assert noticed == list(range(text.sliding_window_size))

# %% [markdown]
# ## 8. Absorbed is expanded
#
# Keys and values of each head are linear maps of the cached latent. One may expand them (good for a long prompt), or
# move the key map over to the query and attend in the latent itself (good for decoding: nothing is expanded). In exact
# arithmetic both are the same. The dot product then runs over `C + R` lanes, and the scale still comes from `N + R`.

# %%
absorbed = built(Numerics(attention_form="absorbed"))
absorbed_TW = absorbed(torch.tensor(prompt))
print(f"largest difference of the logits: {(absorbed_TW - logits_TW).abs().max():.1e}")
torch.testing.assert_close(absorbed_TW, logits_TW, rtol=1e-10, atol=1e-10)

# %% [markdown]
# ## 9. The gate
#
# Each head's output is multiplied by a number between 0 and 1, made from the *input* of the attention, before the
# output projection.

# %%
attention, at = model.model.layers[0].self_attn, "layers.0.attn."
core_THV, gate_TH = seen[at + "core"], seen[at + "gate"]
print("our token's gates, one a head:", gate_TH[t])
assert gate_TH.shape == (len(prompt), text.full.num_attention_heads)
assert ((gate_TH > 0) & (gate_TH < 1)).all()
torch.testing.assert_close(gate_TH, attention.g_proj(seen[at + "input"]).sigmoid())
torch.testing.assert_close(seen[at + "output"], attention.o_proj((core_THV * gate_TH[..., None]).flatten(1)))

# %% [markdown]
# ## 10. The router and its bias
#
# Each token goes to `num_experts_per_tok` experts: 3 of 14 here, 8 of 256 in the release. The router's scores are
# sigmoids. A bias, learnt to balance the load, is added for the *choice*; the *weights* come from the scores without
# it, divided by their sum.

# %%
at = "layers.1.ffn.router."
scores_TE, choice_TE = seen[at + "scores"], seen[at + "choice"]
ids_TK, weights_TK = seen[at + "expert_ids"], seen[at + "weights"]
bias_E = model.model.layers[1].mlp.gate.e_score_correction_bias

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.6), layout="constrained")
experts = torch.arange(text.n_routed_experts)
colours = ["tab:orange" if expert in ids_TK[t].tolist() else "lightgrey" for expert in experts]
left.bar(experts, scores_TE[t], color=colours)
left.set(title="score", xlabel="expert")
right.bar(experts, choice_TE[t], color=colours)
right.set(title="score + bias: the best 3 are chosen", xlabel="expert", ylim=(float(bias_E.min()) - 0.1, None))
plt.show()

torch.testing.assert_close(choice_TE, scores_TE + bias_E)
assert set(choice_TE[t].topk(text.num_experts_per_tok).indices.tolist()) == set(ids_TK[t].tolist())
chosen_TK = scores_TE.gather(-1, ids_TK)
torch.testing.assert_close(weights_TK, chosen_TK / chosen_TK.sum(-1, keepdim=True))
torch.testing.assert_close(weights_TK.sum(-1), torch.ones(len(prompt), dtype=torch.float64))

# %% [markdown]
# The bias matters: for some tokens the best three by score alone are not those chosen. And it is stored in float32 for
# a reason: these biases lie close together, and in bfloat16 many of them are the same number.

# %%
by_score_TK = scores_TE.topk(text.num_experts_per_tok).indices
is_moved_T = (by_score_TK.sort(-1).values != ids_TK.sort(-1).values).any(-1)
print(f"{int(is_moved_T.sum())} of {len(prompt)} tokens have other experts because of the bias")
print(f"{len(bias_E)} biases, {len(bias_E.bfloat16().unique())} different ones in bfloat16")
assert is_moved_T.any()
assert len(bias_E.unique()) == len(bias_E) > len(bias_E.bfloat16().unique())

# %% [markdown]
# ## 11. The shared expert
#
# One more expert sees every token, with no weight and no gate on it. Its output is added to that of the routed ones.

# %%
moe = model.model.layers[1].mlp
torch.testing.assert_close(seen["layers.1.ffn.shared"], moe.shared_experts(seen["layers.1.ffn.input"]))
torch.testing.assert_close(seen["layers.1.ffn.output"], seen["layers.1.ffn.routed"] + seen["layers.1.ffn.shared"])
assert "layers.0.ffn.shared" not in seen  # layer 0 is dense
by_hand_D = sum(
    weight * moe.experts[i](seen["layers.1.ffn.input"][t]) for i, weight in zip(ids_TK[t], weights_TK[t], strict=True)
)
torch.testing.assert_close(seen["layers.1.ffn.routed"][t], by_hand_D)

# %% [markdown]
# ## 12. The caches: what grows, and what does not
#
# Stored are latents, not keys and values of heads. A full layer keeps a row of `C + R` and an index key of `J` for
# every token. A sliding layer keeps a ring of window + drafts rows, written around and around. Let us decode.

# %%
full_values, ring_values, lengths = [], [], []
decoding = Session(model)
decoding.step([StepItem("a", prompt[:1], "prefill")])
for token in (*prompt[1:], *range(100, 120)):
    layers = decoding.request("a").cache.layers
    lengths.append(decoding.length("a"))
    full_values.append(layers[1].bytes // 8)  # float64: eight bytes a value
    ring_values.append(layers[2].bytes // 8)
    decoding.step([StepItem("a", (token,), "decode")])

contexts = torch.logspace(2, 19, 60, base=2, dtype=torch.float64)
full_row, sliding_row = big.full.latent_row + big.index_head_dim, big.sliding.latent_row
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
left.plot(lengths, full_values, label="full layer")
left.plot(lengths, ring_values, label="sliding layer")
left.set(title="tiny: values in the cache of one layer", xlabel="tokens")
left.legend()
right.loglog(contexts, 13 * contexts * full_row * 2 / 2**20, label="13 full layers")
right.loglog(contexts, 33 * contexts.clamp(max=513) * sliding_row * 2 / 2**20, label="33 sliding layers")
right.set(title="released, bfloat16: MiB", xlabel="tokens")
right.legend()
plt.show()

steps = {after - before for before, after in pairwise(full_values)}
assert steps == {text.full.latent_row + text.index_head_dim}
assert set(ring_values) == {(text.sliding_window_size + decoding.max_draft_tokens) * text.sliding.latent_row}

# %% [markdown]
# In the release, at its longest context of 524288 tokens, the latents of the full layers take 7.3 GiB and the sliding
# layers 35 MiB. Stored as plain keys and values of heads, the full layers alone would take 71 times as much.

# %%
longest = big.max_position_embeddings
assert 13 * longest * big.full.latent_row * 2 / 2**30 == 7.3125
assert round(33 * 513 * sliding_row * 2 / 2**20, 1) == 35.1
expanded_row = big.full.num_attention_heads * (big.full.qk_head_dim + big.full.v_head_dim)
print(f"expanded / latent: {expanded_row / big.full.latent_row:.0f}")
assert round(expanded_row / big.full.latent_row) == 71

# %% [markdown]
# How a text is cut into steps must not matter: the same twenty tokens in one step, in chunks that cross the window, or
# one at a time give the same last row. It does not even matter that a ring has wrapped in between.

# %%
for cuts in ((1,) * len(prompt), (6, 2, 11, 1)):
    chunked, start = Session(model), 0
    for count in cuts:
        rows_TW = chunked.step([StepItem("a", prompt[start : start + count], "prefill")])["a"]
        start += count
    assert start == len(prompt)
    torch.testing.assert_close(rows_TW[-1], logits_TW[-1], rtol=1e-12, atol=1e-12)

# %% [markdown]
# ## 13. The draft layer
#
# One small extra layer guesses the token after the next. Row `t` takes the embedding of token `t + 1`, from a table of
# its own, and the hidden state of row `t`, norms each, and joins them: embedding first. Then it is one sliding, dense
# layer with a ring of its own. To guess further it is driven on its own output. The vocabulary head is the model's.

# %%
session.fork("a", "undrafted")
next_token = int(logits_TW[-1].argmax())
recorder = Recorder()
with listening(recorder):
    drafts_SW = session.draft("a", next_token, depth=3)
drafted = concatenated(recorder.observations)
print("drafted tokens:", drafts_SW.argmax(-1).tolist())
for name in ("mtp.0.eh_input", "mtp.0.fused", "mtp.0.attn.core", "mtp.0.normed", "mtp.0.logits"):
    print(f"  {name:16} {tuple(drafted[name].shape)}")

block, D = model.model.layers[text.num_hidden_layers], text.hidden_size
own_embedding_TD = model.model.mtp["embed_tokens"](torch.tensor([*prompt[1:], next_token]))
torch.testing.assert_close(drafted["mtp.0.eh_input"][:, :D], block.enorm(own_embedding_TD))
torch.testing.assert_close(drafted["mtp.0.eh_input"][:, D:], block.hnorm(seen["final_norm"]))
assert not torch.equal(model.model.mtp["embed_tokens"].weight, model.model.embed_tokens.weight)
assert block.self_attn.geometry == text.sliding
assert torch.equal(drafted["mtp.1.logits"][-1], model.lm_head(drafted["mtp.1.normed"])[-1])

# %% [markdown]
# Drafts decide nothing. A request that drafted and one that did not go on alike, to the bit.

# %%
after = session.step([StepItem(request, (next_token,), "decode") for request in ("a", "undrafted")])
assert torch.equal(after["a"], after["undrafted"])

# %% [markdown]
# ## What to change to see it break
#
# * In `built` give `TextModel` a window that is one too short, `dataclasses.replace(text, sliding_window_size=6)`: in
#   step 7 one row fewer notices token 0. On the release that is 512 for 513.
# * In step 5 let `attention.rope` be that of layer 2 (`model.model.layers[2].self_attn.rope`, another base): the
#   product still depends on the distance only. No test of one rotation finds a wrong base; a comparison with the truth
#   does.
# * In `built` set `apply_mla_qkv_lora_rescale=False` in the same way: in step 4 the factor is gone.
# * In step 10 add the bias to the weights as well (`chosen_TK = choice_TE.gather(-1, ids_TK)`): with biases near 7 all
#   weights become almost one third, and text stays plausible.
# * Below, the norm of the rope key is taken away from a copy of the model. Change the copy in another place.

# %%
broken = copy.deepcopy(model)
for layer in broken.model.layers:
    layer.self_attn.k_rope_only_layernorm = torch.nn.Identity()
moved = (rms(broken(torch.tensor(prompt)) - logits_TW) / rms(logits_TW))[t]
print(f"without the rope-key norm our token's logits move by {moved:.0%}")
assert moved > 0.05
