"""timm: vision models with their fused attention switched off."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.base import Built, First, image, register, require

SMALL = {"img_size": 32, "num_classes": 5}
PLAIN = {**SMALL, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}


def timm(
    name: str, path: str, sites: int | None, size: int = 32, kind: str = "pos", note: str = "", **options: Any
) -> None:
    """Register ``timm.models.<path>(**options)``; options that are callables get timm.models and return the value."""
    module_name, _, class_name = path.partition(".")

    def make() -> Built:
        layers = require("timm.layers")
        models = require("timm.models")
        layers.set_fused_attn(False)
        values = {key: value(models) if callable(value) else value for key, value in options.items()}
        first = values.pop("config", None)
        cls = getattr(getattr(models, module_name), class_name)
        return First(cls(*([] if first is None else [first]), **values)), (image(size),), {}

    register(f"timm_{name}", "timm", make, sites=sites, kind=kind, needs=("timm",), note=note)


timm("vit", "vision_transformer.VisionTransformer", 2, **PLAIN)
timm("vit_qk_norm", "vision_transformer.VisionTransformer", 2, qk_norm=True, init_values=0.1, **PLAIN)
timm("vit_map_pool", "vision_transformer.VisionTransformer", 3, global_pool="map", class_token=False, **PLAIN)
timm("deit", "deit.VisionTransformerDistilled", 2, **PLAIN)
timm("vit_rel_bias", "vision_transformer_relpos.VisionTransformerRelPos", 2, **PLAIN)
timm("beit", "beit.Beit", 2, use_rel_pos_bias=True, **PLAIN)
timm("eva", "eva.Eva", 2, use_rot_pos_emb=True, **PLAIN)
timm("cait", "cait.Cait", 1, depth_token_only=1, note="talking heads in the body, one class attention", **PLAIN)
timm("xcit", "xcit.Xcit", 3, cls_attn_layers=1, **PLAIN)
timm(
    "swin",
    "swin_transformer.SwinTransformer",
    4,
    patch_size=4,
    embed_dim=32,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=4,
    **SMALL,
)
timm(
    "swin_v2",
    "swin_transformer_v2.SwinTransformerV2",
    4,
    patch_size=4,
    embed_dim=32,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=4,
    **SMALL,
)
timm(
    "pit",
    "pit.PoolingVisionTransformer",
    2,
    **SMALL,
    patch_size=8,
    stride=4,
    stem_type="overlap",
    base_dims=(16, 16),
    depth=(1, 1),
    heads=(2, 4),
    mlp_ratio=2,
)
timm(
    "twins",
    "twins.Twins",
    None,
    patch_size=4,
    embed_dims=(32, 32, 64, 64),
    num_heads=(2, 2, 4, 4),
    depths=(2, 2, 2, 2),
    sr_ratios=(4, 2, 1, 1),
    wss=(4, 4, 2, 2),
    img_size=64,
    num_classes=5,
    size=64,
)
timm(
    "visformer",
    "visformer.Visformer",
    None,
    img_size=64,
    size=64,
    num_classes=5,
    init_channels=8,
    embed_dim=64,
    depth=(1, 1, 1),
    num_heads=4,
)
timm(
    "levit",
    "levit.Levit",
    None,
    img_size=64,
    size=64,
    num_classes=5,
    embed_dim=(32, 48, 64),
    key_dim=16,
    depth=(1, 1, 1),
    num_heads=(2, 3, 4),
)
timm(
    "tiny_vit",
    "tiny_vit.TinyVit",
    None,
    size=64,
    num_classes=5,
    embed_dims=(16, 32, 32, 64),
    depths=(1, 1, 1, 1),
    num_heads=(1, 2, 2, 4),
    window_sizes=(4, 4, 4, 2),
)
timm(
    "tnt",
    "tnt.TNT",
    4,
    **SMALL,
    patch_size=16,
    embed_dim=64,
    inner_dim=16,
    depth=2,
    num_heads_inner=2,
    num_heads_outer=4,
)
timm("convit", "convit.ConVit", None, **PLAIN, local_up_to_layer=1, kind="any", note="one gated layer, one plain layer")
timm(
    "coat",
    "coat.CoaT",
    0,
    patch_size=4,
    embed_dims=(64,) * 4,
    serial_depths=(1, 1, 0, 0),
    parallel_depth=0,
    num_heads=8,
    mlp_ratios=(2,) * 4,
    kind="neg",
    note="factorised attention",
    **SMALL,
)
timm("davit", "davit.DaVit", 4, depths=(1, 1), embed_dims=(32, 64), num_heads=(2, 4), window_size=4, num_classes=5)
timm(
    "edgenext",
    "edgenext.EdgeNeXt",
    1,
    size=64,
    dims=(16, 32, 32, 64),
    depths=(1, 1, 2, 1),
    global_block_counts=(0, 0, 1, 0),
    kernel_sizes=(3,) * 4,
    heads=(4,) * 4,
    num_classes=5,
)
timm(
    "pvt_v2",
    "pvt_v2.PyramidVisionTransformerV2",
    2,
    depths=(1, 1),
    embed_dims=(32, 64),
    num_heads=(2, 4),
    sr_ratios=(4, 2),
    mlp_ratios=(2, 2),
    num_classes=5,
)
