"""Models of images, sound and several kinds at once of the transformers library, made small by their configs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import Call, Case, generator, one_loss
from models_text import GROUPED, SEQ, TINY, V, quiet, tokens
from torch import nn

CASES: list[Case] = []
B = 2


def build(model: str, config: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def image(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (pixels [B, 3, size, size], labels [B])."""
    g = generator(step, rank)
    return torch.randn(B, 3, size, size, generator=g), torch.randint(2, (B,), generator=g)


def sees(name: str, about: str, model: str, config: str, size: int, **options: Any) -> None:
    """Add a classifier of images."""

    def loss(call: Call, step: int, rank: int) -> torch.Tensor:
        pixels, labels = image(step, rank, size)
        return F.cross_entropy(call(pixel_values=pixels).logits.float(), labels)

    CASES.append(Case(name, about, partial(build, model, config, options), one_loss(loss)))


def any_loss(name: str, about: str, loss: Any, make: Any, **row: Any) -> None:
    """Add a model with a loss of its own."""
    CASES.append(Case(name, about, make, one_loss(loss), **row))


PATCHES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
SOUND = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": V}
SOUND |= {"conv_dim": (8, 8), "conv_kernel": (4, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4}
SOUND |= {"num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
SOUND |= quiet("layerdrop", "hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")

# ---- images

RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "layer_type": "basic", "depths": [1, 2]}
sees("ResNet", "residual stages with BatchNorm", "ResNetForImageClassification", "ResNetConfig", 32, **RESNET)
sees(
    "MobileNetV2",
    "depthwise convolutions, BatchNorm everywhere",
    "MobileNetV2ForImageClassification",
    "MobileNetV2Config",
    32,
    depth_multiplier=0.1,
    min_depth=4,
    depth_divisible_by=4,
    classifier_dropout_prob=0.0,
)
sees(
    "ConvNeXt",
    "convolutions with layer scale",
    "ConvNextForImageClassification",
    "ConvNextConfig",
    32,
    hidden_sizes=[8, 16],
    depths=[1, 2],
    num_stages=2,
)
sees("ViT", "vision transformer", "ViTForImageClassification", "ViTConfig", 16, **PATCHES)
sees("DINOv2", "vision transformer with layer scale", "Dinov2ForImageClassification", "Dinov2Config", 16, **PATCHES)
sees(
    "Swin",
    "shifted windows in stages",
    "SwinForImageClassification",
    "SwinConfig",
    16,
    **{"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4, "drop_path_rate": 0.0},
)
sees(
    "PoolFormer with stochastic depth",
    "drops whole paths at random; both ranks draw numbers of their own",
    "PoolFormerForImageClassification",
    "PoolFormerConfig",
    32,
    hidden_sizes=[8, 8, 16, 16],
    depths=[1, 1, 1, 1],
    drop_path_rate=0.2,
)


def detr_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    pixels, labels = image(step, rank, 32)
    out = call(pixel_values=pixels)
    boxes = out.pred_boxes.float()
    return F.cross_entropy(out.logits.float().transpose(1, 2), labels.unsqueeze(1).expand(-1, boxes.shape[1])) + boxes.square().mean()


def detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(**RESNET, out_features=["stage2"])
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_labels=2,
        num_queries=3,
        **{key: value for key, value in SEQ.items() if key not in ("vocab_size", "max_position_embeddings")},
    )
    return transformers.DetrForObjectDetection(config)


any_loss(
    "DETR",
    "convolutional backbone with frozen BatchNorm, queries, encoder and decoder",
    detr_loss,
    detr,
    cast_first="frozen BatchNorm is all buffers",
)


def mask_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    pixels, _ = image(step, rank, 32)
    points = torch.tensor([[[[4.0, 9.0]]], [[[20.0, 3.0]]]])
    return call(pixel_values=pixels, input_points=points).pred_masks.float().sigmoid().mean()


def sam() -> nn.Module:
    import transformers

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.SamVisionConfig(
        **size, image_size=32, patch_size=8, output_channels=16, mlp_dim=32, window_size=2, global_attn_indexes=[1], num_pos_feats=8
    )
    prompt = transformers.SamPromptEncoderConfig(hidden_size=16, image_size=32, patch_size=8, mask_input_channels=4)
    decoder = transformers.SamMaskDecoderConfig(**size, mlp_dim=32, iou_head_hidden_dim=16, iou_head_depth=2, num_multimask_outputs=3)
    return transformers.SamModel(transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder))


any_loss(
    "SAM",
    "image encoder, prompts and a mask decoder of which parts stay unused",
    mask_loss,
    sam,
    no_bf16="its prompt encoder works in fp32",
)

# ---- sound


def whisper_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    features = torch.randn(B, 8, 16, generator=generator(step, rank))
    return call(input_features=features, labels=tokens(step, rank)).loss


def whisper() -> nn.Module:
    options = {k: v for k, v in SEQ.items() if k != "max_position_embeddings"}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    options |= {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32, "attn_implementation": "eager"}
    return build("WhisperForConditionalGeneration", "WhisperConfig", {**options, **ends})


any_loss("Whisper", "spectrogram encoder with a fixed table, tied decoder", whisper_loss, whisper)


def ctc_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    sound = torch.randn(B, 256, generator=generator(step, rank))
    return call(input_values=sound, labels=tokens(step, rank)[:, :4]).loss


any_loss(
    "Wav2Vec2",
    "convolutions on sound, weight norm, CTC",
    ctc_loss,
    partial(build, "Wav2Vec2ForCTC", "Wav2Vec2Config", SOUND),
)

# ---- several kinds at once


def clip_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    pixels, _ = image(step, rank, 16)
    return call(input_ids=tokens(step, rank), pixel_values=pixels, return_loss=True).loss


def clip() -> nn.Module:
    import transformers

    text = transformers.CLIPTextConfig(**TINY, eos_token_id=2)
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=PATCHES, projection_dim=8))


any_loss("CLIP", "two towers, contrastive loss with a trained temperature", clip_loss, clip)


def llava_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    pixels, _ = image(step, rank, 16)
    ids = tokens(step, rank)
    ids = torch.cat([torch.full((B, 4), V), ids], 1)
    return call(input_ids=ids, pixel_values=pixels, labels=ids.clamp(max=V - 1)).loss


def llava() -> nn.Module:
    import transformers

    vision = transformers.CLIPVisionConfig(**PATCHES)
    text = transformers.LlamaConfig(**{**GROUPED, "vocab_size": V + 1})
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=V, vision_feature_layer=-1)
    model = transformers.LlavaForConditionalGeneration(config)
    model.model.vision_tower.requires_grad_(False)
    return model


any_loss("LLaVA", "frozen image tower, projector, language model", llava_loss, llava)
