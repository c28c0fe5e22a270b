"""All supported types of vision models: hidden states with images are those of transformers' own forward pass."""

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText, Idefics3Config, Qwen2VLConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_models import load_vision_model, picture

from agent_r1.core.images import decode_image
from agent_r1.core.messages import Message, Text
from agent_r1.model.forward import hidden_states
from agent_r1.model.vision import GRID_MODELS, TILE_MODELS, PassImages
from agent_r1.renderers.byte_tokenizer import byte_tokenizer
from research.tiny_vision.models import PATCH, TILE, make_vision_model, save_vision_model, with_vision_tokens

IMAGES = (picture("red"), picture("blue", 40, 64))


def config_of(name, tokenizer):
    """A tiny configuration with two images of time in each patch of the Qwen family, as real models have."""
    if name in TILE_MODELS:
        config = make_vision_model("smolvlm", tokenizer, seed=0).config
        return Idefics3Config(**other_type(config.to_dict())) if name == "idefics3" else config
    config = make_vision_model("qwen3_vl" if name == "qwen3_vl" else "qwen2_5_vl", tokenizer, seed=0).config
    config.vision_config.temporal_patch_size = 2
    if name == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
        config = Qwen2VLConfig(**{**other_type(config.to_dict()), "vision_config": vision})
    return config


def other_type(values):
    """The values of a configuration, for a type of model with equal names of the text settings."""
    text = {name: value for name, value in values["text_config"].items() if name != "model_type"}
    vision = {name: value for name, value in values["vision_config"].items() if name != "model_type"}
    text |= {"model_type": "llama"} if values["model_type"] == "smolvlm" else {}
    own = {name: value for name, value in values.items() if name not in ("model_type", "architectures")}
    return {**own, "text_config": text, "vision_config": vision}


@pytest.mark.parametrize("name", [*GRID_MODELS, *TILE_MODELS])
def test_hidden_states_with_images_are_those_of_transformers(name, tmp_path):
    tokenizer = with_vision_tokens(byte_tokenizer(), "smolvlm" if name in TILE_MODELS else "qwen2_5_vl")
    config = config_of(name, tokenizer)
    torch.manual_seed(0)
    save_vision_model(AutoModelForImageTextToText.from_config(config), tokenizer, tmp_path)
    if name in GRID_MODELS:
        Qwen2VLImageProcessorPil(
            patch_size=PATCH, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=128**2
        ).save_pretrained(tmp_path)
    elif name == "idefics3":
        size, most = {"longest_edge": 2 * TILE}, {"longest_edge": TILE}
        Idefics3ImageProcessorPil(size=size, max_image_size=most).save_pretrained(tmp_path)
    vision = load_vision_model(tmp_path)
    parts = (Text("Look: "), IMAGES[0], Text(" and "), IMAGES[1], Text(" What is it?"))
    rendered = vision.renderer.render((Message("user", parts),))
    ids = torch.tensor([rendered.token_ids])
    made = PassImages.of([rendered.media], ids.shape[1], vision.images, torch.device("cpu"))
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    pixels = processor([[decode_image(one.data) for one in IMAGES]], return_tensors="pt")
    if name in GRID_MODELS:
        pixels["mm_token_type_ids"] = (ids == config.image_token_id).long()
    with torch.no_grad():
        theirs = vision.model.base_model(input_ids=ids, **pixels).last_hidden_state
        ours, blind = hidden_states(vision.model, ids, images=made), hidden_states(vision.model, ids)
    assert vision.model.config.model_type == name
    assert (ours - theirs).abs().max() < 1e-5 < 1e-3 < (ours - blind).abs().max()
