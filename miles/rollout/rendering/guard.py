"""A tokenizer that a user's words cannot command: control tokens typed as text stay text.

Texts that come from clients are marked before they are rendered (`escape`): a non-character goes into every
control string. Renderers join the marked text with their own scaffold and encode it here, where unmarked
control strings become control tokens and marked ones are encoded as the plain text they are.
"""

import json
import re
from typing import Any

from miles.errors import ConfigError

__all__ = ["GuardedTokenizer"]

_MARK = "\ufdd0"
_SHORT, _MOST_SHORT = 32, 1024
_MARKS = re.compile(f"({_MARK}|\\\\ufdd0)({_MARK}|\\\\ufdd0)?")  # some templates put tools through ASCII-only JSON
_LOOKS_LIKE_CONTROL = re.compile(
    r"[<\[|｜].*([|｜_]|think|tool|arg|channel|turn|function|param|invoke|message|call|image|vision|audio|video).*[>\]|｜]"
)


class GuardedTokenizer:
    """Stands in for a fast Hugging Face tokenizer; everything but encoding is delegated."""

    def __init__(self, tokenizer: Any, *, escapes: bool = True) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError("this model has no fast tokenizer (tokenizer.json); exact sessions need one")
        self.inner, self._escapes = tokenizer, escapes
        added = tokenizer.added_tokens_decoder.values()
        special = sorted({str(t) for t in added if t.special and len(str(t)) > 1}, key=len, reverse=True)
        control = {str(t) for t in added if len(str(t)) > 1 and (t.special or _LOOKS_LIKE_CONTROL.fullmatch(str(t)))}
        self.control = sorted(control, key=len, reverse=True)
        self._special_re = _any_of(special)
        self._control_re = _any_of(self.control)
        self._added_re = _any_of(sorted({str(t) for t in added if str(t)}, key=len, reverse=True))
        self._plain: Any = None
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._short: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def escape(self, value: Any, *, markup: bool = False) -> Any:
        """Mark control strings in a text, or in all texts of a JSON value.

        With `markup`, thinking and tool marks stay what they are: an assistant's text may hold them.
        """
        if isinstance(value, str):
            value = value if value.isascii() else value.encode("utf-8", "replace").decode()  # halves of pairs
            pattern = self._special_re if markup else self._control_re
            if not self._escapes:
                return value
            if _MARK in value or _MARK_AS_JSON in value or pattern.search(value):
                doubled = _MARKS.sub(lambda m: "".join(2 * (part or "") for part in m.groups()), value)
                return pattern.sub(lambda m: m[0][0] + _MARK + m[0][1:], doubled)
            return value
        if isinstance(value, dict):
            return {self.escape(k): self.escape(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(v) for v in value]
        return value

    def encode(self, text: str, add_special_tokens: bool = False, **options: Any) -> list[int]:
        """Ids of rendered text. Special tokens are never added: templates write their own."""
        if len(text) <= _SHORT:  # templates encode the same few words again and again
            known = self._short.get(text)
            if known is None:
                known = self._encode(text)
                if len(self._short) < _MOST_SHORT:
                    self._short[text] = known
            return list(known)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        if _MARK in text or _MARK_AS_JSON in text:
            return [token for token, _, _ in self._marked(text)]
        # The wrapper around the tokenizer costs ten times what the tokenizer does for a short text.
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> str:
        """The text as the model wrote it; nothing is cleaned up."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def __call__(self, text: str, *, return_offsets_mapping: bool = False, **options: Any) -> dict[str, Any]:
        """Ids, and the place in the text that each came from."""
        if _MARK in text or _MARK_AS_JSON in text:
            tokens = self._marked(text)
            return {"input_ids": [t for t, _, _ in tokens], "offset_mapping": [(a, b) for _, a, b in tokens]}
        encoding = self._backend.encode(text, add_special_tokens=False)
        return {"input_ids": encoding.ids, "offset_mapping": encoding.offsets}

    def _marked(self, text: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of each token; positions are those of the marked text."""
        tokens: list[tuple[int, int, int]] = []
        at = 0
        for match in [*self._added_re.finditer(text), None]:
            end = match.start() if match else len(text)
            tokens += self._plain_tokens(text[at:end], at)
            if match:
                tokens.append((self.inner.convert_tokens_to_ids(match[0]), match.start(), match.end()))
                at = match.end()
        return tokens

    def _plain_tokens(self, text: str, offset: int) -> list[tuple[int, int, int]]:
        if not text:
            return []
        letters: list[str] = []
        places: list[int] = []
        at = 0
        for match in [*_MARKS.finditer(text), None]:
            end = match.start() if match else len(text)
            letters.append(text[at:end])
            places += range(at, end)
            if match:
                if match[2]:
                    letters.append(match[1])
                    places += [match.start()] * len(match[1])
                at = match.end()
        encoding = self._without_added().encode("".join(letters), add_special_tokens=False)
        places.append(len(text))
        spans = ((places[a] + offset, places[b] + offset) for a, b in encoding.offsets)
        return [(token, a, b) for token, (a, b) in zip(encoding.ids, spans, strict=True)]

    def _without_added(self) -> Any:
        """The same tokenizer in whose eyes all text is letters. (Leaving some added tokens in would renumber them.)"""
        if self._plain is None:
            from tokenizers import Tokenizer

            spec = json.loads(self.inner.backend_tokenizer.to_str())
            spec["added_tokens"] = []
            spec["post_processor"] = None
            self._plain = Tokenizer.from_str(json.dumps(spec))
        return self._plain


_MARK_AS_JSON = "\\ufdd0"


def _any_of(texts: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")
