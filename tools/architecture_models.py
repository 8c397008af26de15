# SPDX-License-Identifier: Apache-2.0
"""Small models of `transformers`, one of each architecture, with weights drawn at random and a batch to train on.

model = make_model("llama")
loss = compute_loss(model, make_batch("llama", model))
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB, ROWS, LENGTH = 61, 4, 8  # no mesh divides the vocabulary
HIDDEN, HEADS, INNER, LAYERS = 32, 4, 48, 2

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
GPT |= {"n_positions": 32}
PAIRS = {"vocab_size": VOCAB, "d_model": HIDDEN, "max_position_embeddings": 32}
PAIRS |= {"decoder_start_token_id": 1}
PAIRS |= {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (
        ("layers", LAYERS),
        ("attention_heads", HEADS),
        ("ffn_dim", INNER),
    )
}
PICTURES = {**SIZES, "image_size": 16, "patch_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WAVES = {**SIZES, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
WAVES |= {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8}
WAVES |= {"num_conv_pos_embedding_groups": 4, "feat_extract_norm": "layer"}
WAVES |= {"mask_time_prob": 0.0, "apply_spec_augment": False}
SPEECH = {**PAIRS, "num_mel_bins": 8, "max_source_positions": 16}
SPEECH |= {"max_target_positions": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
LATENT |= {"qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": HEADS}


@dataclass(frozen=True)
class Architecture:
    """A class of `transformers` and the sizes of a small model of it.

    ``kind``: of its inputs: text, pairs, picture, waves, speech, or both (text and picture). ``parts``: the sizes of
    configs inside of its config. ``group``: for the page.
    """

    group: str
    model: str
    sizes: dict[str, Any]
    kind: str = "text"
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)


def _table() -> dict[str, Architecture]:
    table: dict[str, Architecture] = {}

    def add(group: str, kind: str, **models: Any) -> None:
        for name, (model, sizes) in models.items():
            table[name] = Architecture(group, model, sizes, kind)

    add(
        "decoder",
        "text",
        llama=("LlamaForCausalLM", GROUPED),
        mistral=("MistralForCausalLM", GROUPED),
        qwen2=("Qwen2ForCausalLM", GROUPED),
        qwen3=("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}),
        gemma=("GemmaForCausalLM", {**GROUPED, "head_dim": 8}),
        gemma2=("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8}),
        gemma3=("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8}),
        phi=("PhiForCausalLM", GROUPED),
        phi3=("Phi3ForCausalLM", GROUPED),
        gpt2=("GPT2LMHeadModel", GPT),
        gptj=("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
        gpt_neo=(
            "GPTNeoForCausalLM",
            {**SIZES, "num_layers": 2, "num_heads": HEADS, "window_size": 4}
            | {"attention_types": [[["global", "local"], 1]]},
        ),
        gpt_neox=("GPTNeoXForCausalLM", SIZES),
        gpt_bigcode=("GPTBigCodeForCausalLM", GPT),
        codegen=("CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
        opt=(
            "OPTForCausalLM",
            {**SIZES, "ffn_dim": INNER, "word_embed_proj_dim": HIDDEN},
        ),
        bloom=("BloomForCausalLM", {**SIZES, "n_layer": 2, "n_head": HEADS}),
        falcon=("FalconForCausalLM", {**SIZES, "multi_query": True, "alibi": False}),
        mpt=(
            "MptForCausalLM",
            {"vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": HEADS}
            | {"n_layers": 2, "max_seq_len": 32},
        ),
        starcoder2=("Starcoder2ForCausalLM", GROUPED),
        cohere=("CohereForCausalLM", GROUPED),
        stablelm=("StableLmForCausalLM", GROUPED),
        olmo2=("Olmo2ForCausalLM", GROUPED),
        glm=("GlmForCausalLM", {**GROUPED, "head_dim": 8}),
        granite=("GraniteForCausalLM", GROUPED),
        persimmon=("PersimmonForCausalLM", SIZES),
        nemotron=("NemotronForCausalLM", GROUPED),
        helium=("HeliumForCausalLM", {**GROUPED, "head_dim": 8}),
        biogpt=("BioGptForCausalLM", SIZES),
    )
    add(
        "encoder",
        "text",
        bert=("BertForMaskedLM", SIZES),
        roberta=("RobertaForMaskedLM", SIZES),
        distilbert=(
            "DistilBertForMaskedLM",
            {"vocab_size": VOCAB, "dim": HIDDEN, "hidden_dim": INNER, "n_layers": 2}
            | {"n_heads": HEADS, "max_position_embeddings": 32},
        ),
        electra=("ElectraForMaskedLM", {**SIZES, "embedding_size": HIDDEN}),
        albert=("AlbertForMaskedLM", {**SIZES, "embedding_size": 16}),
        deberta_v2=(
            "DebertaV2ForMaskedLM",
            {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
        ),
        modernbert=("ModernBertForMaskedLM", SIZES),
        mpnet=("MPNetForMaskedLM", SIZES),
        esm=("EsmForMaskedLM", {**SIZES, "mask_token_id": 4, "pad_token_id": 0}),
    )
    add(
        "encoder-decoder",
        "pairs",
        t5=(
            "T5ForConditionalGeneration",
            {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 8, "d_ff": INNER}
            | {"num_layers": 2, "num_heads": HEADS, "feed_forward_proj": "gated-gelu"}
            | {"decoder_start_token_id": 1},
        ),
        bart=("BartForConditionalGeneration", PAIRS),
        mbart=("MBartForConditionalGeneration", PAIRS),
        pegasus=("PegasusForConditionalGeneration", PAIRS),
        marian=("MarianMTModel", {**PAIRS, "decoder_vocab_size": VOCAB}),
        m2m_100=("M2M100ForConditionalGeneration", PAIRS),
        blenderbot=("BlenderbotForConditionalGeneration", PAIRS),
    )
    add(
        "vision",
        "picture",
        vit=("ViTForImageClassification", PICTURES),
        deit=("DeiTForImageClassification", PICTURES),
        beit=("BeitForImageClassification", PICTURES),
        dinov2=("Dinov2ForImageClassification", PICTURES),
        siglip_vision=("SiglipVisionModel", PICTURES),
        swin=(
            "SwinForImageClassification",
            {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1]}
            | {"num_heads": [4, 4], "window_size": 2},
        ),
    )
    add(
        "speech",
        "waves",
        wav2vec2=("Wav2Vec2ForCTC", WAVES),
        hubert=("HubertForCTC", WAVES),
    )
    add(
        "speech",
        "speech",
        whisper=("WhisperForConditionalGeneration", SPEECH),
        speech_to_text=(
            "Speech2TextForConditionalGeneration",
            {**SPEECH, "conv_channels": 16, "input_feat_per_channel": 8},
        ),
    )
    add(
        "mixture of experts",
        "text",
        mixtral=("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
        qwen2_moe=(
            "Qwen2MoeForCausalLM",
            {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": INNER},
        ),
        qwen3_moe=("Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS, "head_dim": 8}),
        olmoe=("OlmoeForCausalLM", {**GROUPED, **EXPERTS}),
        deepseek_v3=(
            "DeepseekV3ForCausalLM",
            {**SIZES, **LATENT, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
            | {"n_group": 2, "topk_group": 1, "n_routed_experts": 4}
            | {"n_shared_experts": 1, "moe_intermediate_size": 16},
        ),
        gpt_oss=(
            "GptOssForCausalLM",
            {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
            | {"head_dim": 8, "sliding_window": 4},
        ),
        granitemoe=(
            "GraniteMoeForCausalLM",
            {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
    )
    text, picture = {**SIZES, "eos_token_id": 2}, {**PICTURES, "projection_dim": 16}
    both = {"text_config": text, "vision_config": picture}
    add(
        "multimodal",
        "both",
        clip=("CLIPModel", {"projection_dim": 16}),
        siglip=("SiglipModel", {}),
        vilt=("ViltForQuestionAnswering", PICTURES),
    )
    for name in ("clip", "siglip"):
        one = table[name]
        table[name] = Architecture(one.group, one.model, one.sizes, one.kind, both)
    llava = {
        "text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {**PICTURES, "model_type": "clip_vision_model"},
    }
    table["llava"] = Architecture(
        "multimodal",
        "LlavaForConditionalGeneration",
        {"image_token_index": 60, "vision_feature_layer": -1},
        "tokens of pictures",
        llava,
    )
    return table


ARCHITECTURES = _table()
_OFF = ("dropout", "drop_prob", "pdrop", "drop_path_rate", "layerdrop", "drop_rate")
_COMMON = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def make_config(name: str, **changes: Any) -> Any:
    """The config, with all dropout off."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    one = ARCHITECTURES[name]
    kind = getattr(transformers, one.model).config_class
    common = {}
    if not one.parts:
        plain = kind()
        set_ = {key for key in _COMMON if getattr(plain, key, None) is not None}
        common = {key: _COMMON[key] for key in set_}
    config = kind(**{**common, **one.sizes, **one.parts, **changes})
    for inner in (config, *(getattr(config, part) for part in one.parts)):
        _switch_off(inner)
    return config


def _switch_off(config: Any) -> None:
    for key, value in list(vars(config).items()):
        is_number = isinstance(value, float)
        if is_number and any(word in key for word in _OFF):
            setattr(config, key, 0.0)


def make_model(name: str, **changes: Any) -> Any:
    """The model in float64, in training mode, with weights that are large enough to tell mistakes."""
    import transformers

    config = make_config(name, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, ARCHITECTURES[name].model)(config)
    for parameter in model.parameters():
        _draw(parameter)
    if ARCHITECTURES[name].group == "mixture of experts":
        model.set_experts_implementation("eager")  # the others have no float64
    return model.double().train()


def _draw(parameter: Any) -> None:
    with torch.no_grad():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:  # norms and biases start alike; a mix-up would not show
            is_scale = parameter.numel() and parameter.abs().max() > 0
            torch.nn.init.normal_(parameter, mean=float(is_scale), std=0.1)


def make_batch(name: str, model: Any) -> dict[str, Any]:
    """Keyword arguments of forward, of ROWS rows."""
    generator = torch.Generator().manual_seed(1)
    kind = ARCHITECTURES[name].kind
    ids, labels = torch.randint(3, VOCAB - 1, (2, ROWS, LENGTH), generator=generator)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    if kind == "text":
        return {"input_ids": ids, "labels": labels}
    if kind == "pairs":
        return {"input_ids": ids, "labels": labels}
    if kind == "picture":
        size = model.config.image_size
        batch = {"pixel_values": draw(3, size, size)}
        classifies = "Classification" in type(model).__name__
        return {**batch, "labels": labels[:, 0] % 2} if classifies else batch
    if kind == "waves":
        return {"input_values": draw(400), "labels": labels[:, :3]}
    if kind == "speech":
        frames = 2 * model.config.max_source_positions
        is_first = name == "whisper"
        shape = (8, frames) if is_first else (frames, 8)
        return {"input_features": draw(*shape), "labels": labels}
    return _make_multimodal(name, ids, labels, draw)


def _make_multimodal(name: str, ids: Any, labels: Any, draw: Any) -> dict[str, Any]:
    pictures = draw(3, 16, 16)
    if name == "llava":
        ids[:, 1:5] = 60  # one for each patch
        return {"input_ids": ids, "pixel_values": pictures, "labels": labels}
    ids[:, -1] = 2
    batch = {"input_ids": ids, "pixel_values": pictures}
    if name == "vilt":
        return {**batch, "labels": draw(2).sigmoid()}
    return {**batch, "return_loss": True}


def compute_loss(model: Any, batch: dict[str, Any]) -> Any:
    """The model's own loss, or one of its outputs."""
    output = model(**batch)
    if getattr(output, "loss", None) is not None:
        return output.loss
    return output[0].square().mean() + output[1].square().mean()
