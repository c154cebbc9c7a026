"""Diffusion models, adapters, adversaries, recommenders and models from torch's own layers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import models_text
import models_vision
import torch
import torch.nn.functional as F
from case import Call, Case, Phase, generator, one_loss
from models_text import GPT, GROUPED, V, token_loss, tokens
from torch import nn

CASES: list[Case] = []
B, T, D = 2, 6, 16


def add(name: str, about: str, make: Any, loss: Any = None, **row: Any) -> None:
    CASES.append(Case(name, about, make, row.pop("phases", None) or one_loss(loss), **row))


def noise(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(step, rank))


# ---- diffusion


def diffusion_loss(extra: Any, call: Call, step: int, rank: int) -> torch.Tensor:
    image = noise(step, rank, B, 3, 8, 8)
    target = noise(step + 1000, rank, B, 3, 8, 8)
    times = torch.randint(100, (B,), generator=generator(step, rank))
    return F.mse_loss(call(image + target, times, **extra(step, rank)).sample.float(), target)


def diffuser(name: str, **options: Any) -> nn.Module:
    import diffusers

    return getattr(diffusers, name)(**options)


UNET = {"sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "in_channels": 3, "out_channels": 3}
add(
    "UNet2D",
    "diffusion UNet with attention and skip connections",
    partial(
        diffuser, "UNet2DModel", **UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")
    ),
    partial(diffusion_loss, lambda step, rank: {}),
)
add(
    "UNet2D with text",
    "diffusion UNet with cross-attention, as in Stable Diffusion",
    partial(
        diffuser,
        "UNet2DConditionModel",
        **UNET,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
    partial(diffusion_loss, lambda step, rank: {"encoder_hidden_states": noise(step + 500, rank, B, T, 8)}),
)
add(
    "DiT",
    "diffusion transformer with adaptive norms and dropped labels",
    partial(
        diffuser,
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        sample_size=8,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    ),
    partial(diffusion_loss, lambda step, rank: {"class_labels": torch.randint(10, (B,), generator=generator(step, rank))}),
)


def autoencoder_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    image = noise(step, rank, B, 3, 8, 8)
    return F.mse_loss(call(image, sample_posterior=False).sample.float(), image)


add(
    "AutoencoderKL",
    "convolutional VAE of a latent diffusion model",
    partial(
        diffuser,
        "AutoencoderKL",
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=2,
    ),
    autoencoder_loss,
)

# ---- adapters


def adapted(model: str, config: str, options: dict[str, Any], kind: str, **adapter: Any) -> nn.Module:
    import peft

    base = models_text.build(model, config, None, options)
    return peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **adapter))


llama = partial(adapted, "LlamaForCausalLM", "LlamaConfig", GROUPED)
gpt2 = partial(adapted, "GPT2LMHeadModel", "GPT2Config", GPT)
add("LoRA on Llama", "peft adapters on all projections", partial(llama, "LoraConfig", r=2, target_modules="all-linear"), token_loss)
add(
    "LoRA on GPT-2, saving the head",
    "peft adapters on Conv1D layers, the tied head copied and trained",
    partial(gpt2, "LoraConfig", r=2, target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True),
    token_loss,
)
add(
    "DoRA on Llama",
    "adapters with a norm of the whole weight",
    partial(llama, "LoraConfig", r=2, use_dora=True, target_modules=["q_proj", "v_proj"]),
    token_loss,
)
add("IA3 on Llama", "scaling vectors on activations", partial(llama, "IA3Config"), token_loss)
add("Prompt tuning on Llama", "only virtual tokens are trained", partial(llama, "PromptTuningConfig", num_virtual_tokens=3), token_loss)

# ---- several models


def critic_way(calls: Any, backward: Any, step: int, rank: int) -> torch.Tensor:
    made, real = calls["generator"](noise(step, rank, B, D)).detach(), noise(step + 1000, rank, B, D)
    loss = F.softplus(calls["critic"](made)).mean() + F.softplus(-calls["critic"](real)).mean()
    backward(loss)
    return loss


def generator_way(calls: Any, backward: Any, step: int, rank: int) -> torch.Tensor:
    loss = F.softplus(-calls["critic"](calls["generator"](noise(step, rank, B, D)))).mean()
    backward(loss)
    return loss


def adversaries() -> dict[str, nn.Module]:
    def net(out: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.LeakyReLU(0.2)) for _ in range(2)), nn.Linear(D, out))

    return {"generator": net(D), "critic": net(1)}


add(
    "GAN",
    "generator and critic in two engines; one's loss runs through the other",
    adversaries,
    phases=(Phase(critic_way, "critic"), Phase(generator_way, "generator")),
)


class SelfDistilled(nn.Module):
    """A student that learns from a moving average of itself (DINO)."""

    def __init__(self):
        super().__init__()
        self.student = models_vision.build("ViTModel", "ViTConfig", models_vision.PATCHES)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, one, other):
        with torch.no_grad():
            wanted = (self.teacher(pixel_values=other).pooler_output / 0.1).softmax(-1)
        return -(wanted * self.student(pixel_values=one).pooler_output.log_softmax(-1)).sum(-1).mean()


def follow_student(module: nn.Module, whole: Any) -> None:
    pairs = list(zip(module.student.parameters(), module.teacher.parameters(), strict=True))
    with whole([param for pair in pairs for param in pair]), torch.no_grad():
        for student, teacher in pairs:
            teacher.lerp_(student.to(teacher.dtype), 0.1)


def distilled_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    image, _ = models_vision.image(step, rank, 16)
    return call(image, image.flip(-1))


add(
    "DINO",
    "student and teacher; the teacher is a moving average, written after each step",
    SelfDistilled,
    distilled_loss,
    follow=follow_student,
)

# ---- recommenders and torch's own layers


class Recommender(nn.Module):
    """Bags of sparse embeddings, their products, and two small networks (DLRM)."""

    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(V, D, sparse=True, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, D), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(D + 6, D), nn.ReLU(), nn.Linear(D, 1))

    def forward(self, dense, ids, label):
        parts = torch.stack([self.bottom(dense), *(bag(ids[:, i]) for i, bag in enumerate(self.bags))], 1)
        rows, columns = torch.triu_indices(4, 4, 1)
        products = (parts @ parts.transpose(1, 2))[:, rows, columns]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([parts[:, 0], products], -1)).squeeze(-1), label)


def click_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    g = generator(step, rank)
    return call(torch.randn(B, 4, generator=g), torch.randint(V, (B, 3, 2), generator=g), torch.randint(2, (B,), generator=g).float())


add("DLRM", "sparse embedding bags, their products, small networks", Recommender, click_loss)


class RecurrentLM(nn.Module):
    """A language model with an LSTM and a tied head."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(V, D), nn.LSTM(D, D, 2, batch_first=True)
        self.head = nn.Linear(D, V)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return F.cross_entropy(self.head(self.rnn(self.words(ids))[0])[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


add(
    "LSTM language model",
    "two layers of nn.LSTM, tied head",
    RecurrentLM,
    lambda call, step, rank: call(tokens(step, rank)),
)


class Translator(nn.Module):
    """torch.nn.Transformer: attention reads its output projection without calling it."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.net = nn.Transformer(D, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.words.weight.dtype)
        out = self.net(self.words(source), self.words(target), tgt_mask=mask)
        return F.cross_entropy((out @ self.words.weight.t()).flatten(0, 1), target.flatten())


add(
    "nn.Transformer",
    "torch's own encoder and decoder; attention uses its output weight directly",
    Translator,
    lambda call, step, rank: call(tokens(step, rank), tokens(step + 9, rank)),
)


class VAE(nn.Module):
    """A variational autoencoder that draws its own noise."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2)), nn.Linear(D, 8))
        self.decode = nn.Sequential(nn.Linear(4, D), *(nn.Sequential(nn.Tanh(), nn.Linear(D, D)) for _ in range(2)))

    def forward(self, x):
        mean, log_var = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return F.mse_loss(self.decode(z), x) + 0.1 * (mean**2 + log_var.exp() - 1 - log_var).mean()


add("VAE", "draws noise in its forward", VAE, lambda call, step, rank: call(noise(step, rank, B, D)))


class MessagePassing(nn.Module):
    """Message passing over a graph whose edges differ from sample to sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"edge": nn.Linear(2 * D, D), "node": nn.GRUCell(D, D)}) for _ in range(2))
        self.out = nn.Linear(D, 1)

    def forward(self, nodes, edges):
        for layer in self.layers:
            messages = torch.relu(layer["edge"](torch.cat([nodes[edges[0]], nodes[edges[1]]], -1)))
            nodes = layer["node"](torch.zeros_like(nodes).index_add(0, edges[1], messages), nodes)
        return self.out(nodes).mean().square()


def graph_loss(call: Call, step: int, rank: int) -> torch.Tensor:
    g = generator(step, rank)
    count = int(torch.randint(5, 12, (), generator=g))
    return call(torch.randn(5, D, generator=g), torch.randint(5, (2, count), generator=g))


add("Graph network", "message passing over edges that differ in number", MessagePassing, graph_loss)
