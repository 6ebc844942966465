"""Keys and values while several completions of each prompt are being written.

A prompt's keys and values are held once, whatever the number of its completions, and the completions' own grow in
place. All rows are equally far into their completion, so their own part needs no mask.

Shapes: P prompts, N rows (running completions), K key-value heads, R query heads per key-value head, D head dimension.
"""

import torch
from torch import Tensor


class SharedPromptCache:
    """Cache of one generation call, all layers.

    Args:
        prompt_lengths: `[P]`, on the CPU. In the prefill row the prompts follow one another.
        prompt_of_row: `[N]` which prompt each row continues.
        max_new_tokens: most tokens a row can take.
    """

    def __init__(self, prompt_lengths: Tensor, prompt_of_row: Tensor, max_new_tokens: int, device: torch.device):
        self.device = device
        self.max_new_tokens = max_new_tokens
        self.prompt_lengths = prompt_lengths.to(device)
        column = torch.arange(int(prompt_lengths.max()))
        starts = torch.cumsum(prompt_lengths, 0) - prompt_lengths
        real = column < prompt_lengths[:, None]
        self._prompt_index = torch.where(real, starts[:, None] + column, 0).to(device)
        self._prompt_pad = (~real).to(device)
        self._padded_prompts = not bool(real.all())
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.length = 0
        self._set_rows(prompt_of_row)

    def store_prompts(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Takes a layer's keys and values of the prefill row, each `[row, K, D]`."""
        self.prompts[layer] = tuple(x[self._prompt_index].transpose(1, 2).contiguous() for x in (key, value))  # type: ignore[assignment]

    def keep_rows(self, rows: Tensor) -> None:
        """Drops all rows but the given ones, `[M]` indices on the CPU."""
        self._set_rows(self.prompt_of_row[rows])
        index = rows.to(self.device)
        for layer, (key, value) in self.own.items():
            self.own[layer] = (key[index], value[index])

    def positions(self) -> Tensor:
        """`[N]` position of the token each row is about to take."""
        return self.prompt_lengths[self._row_prompt] + self.length

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """One new token per row: `[1, N, heads, D]` attention over the row's prompt and its own tokens.

        Args:
            query: `[1, heads, N, D]`; key, value: `[1, K, N, D]`, which are appended.
        """
        own_key, own_value = self._append(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        prompt_key, prompt_value = self.prompts[layer]
        rows, heads = query.shape[2], query.shape[1]
        kv_heads, dim = own_key.shape[1], query.shape[3]
        q = (query[0].transpose(0, 1) * scale).view(rows, kv_heads, heads // kv_heads, dim)
        prompt_scores = self._from_slots(self._to_slots(q) @ prompt_key.transpose(2, 3), rows, kv_heads)
        own_scores = q @ own_key.transpose(2, 3)
        if self._padded_prompts:
            prompt_scores.masked_fill_(self._row_prompt_pad, -torch.inf)
        if window is not None and self._longest + self.length >= window:
            self._apply_window(prompt_scores, own_scores, window)
        split = prompt_scores.shape[-1]
        shares = torch.cat([prompt_scores, own_scores], -1).softmax(-1, dtype=torch.float32).to(value.dtype)
        prompt_part = self._to_slots(shares[..., :split]) @ prompt_value
        out = self._from_slots(prompt_part, rows, kv_heads) + shares[..., split:] @ own_value
        return out.reshape(1, rows, heads, dim)

    def _append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores `[N, K, D]` keys and values of the current token; returns all so far, `[N, K, length, D]`."""
        if layer not in self.own or self.own[layer][0].shape[2] <= self.length:
            self._grow(layer, key)
        stored_key, stored_value = self.own[layer]
        stored_key[:, :, self.length] = key
        stored_value[:, :, self.length] = value
        return stored_key[:, :, : self.length + 1], stored_value[:, :, : self.length + 1]

    def _grow(self, layer: int, like: Tensor) -> None:
        capacity = min(max(2 * self.length, 64), self.max_new_tokens)
        rows, heads, dim = like.shape
        fresh = tuple(like.new_empty(rows, heads, capacity, dim) for _ in range(2))
        for new, old in zip(fresh, self.own.get(layer, ()), strict=False):
            new[:, :, : self.length] = old
        self.own[layer] = fresh  # type: ignore[assignment]

    def _set_rows(self, prompt_of_row: Tensor) -> None:
        self.prompt_of_row = prompt_of_row
        prompts = len(self.prompt_lengths)
        counts = torch.bincount(prompt_of_row, minlength=prompts)
        width = int(counts.max())
        order = torch.argsort(prompt_of_row, stable=True)
        slot = torch.arange(len(order)) - (torch.cumsum(counts, 0) - counts)[prompt_of_row[order]]
        slots = torch.zeros(prompts, width, dtype=torch.long)
        slots[prompt_of_row[order], slot] = order
        flat = torch.empty(len(order), dtype=torch.long)
        flat[order] = prompt_of_row[order] * width + slot
        # Whole groups in the order of their prompts: rows are slots, and no gathering is needed.
        self._regular = prompts * width == len(order) and bool((order == torch.arange(len(order))).all())
        self._slots, self._flat_slot = slots.to(self.device), flat.to(self.device)
        self._row_prompt = prompt_of_row.to(self.device)
        self._row_prompt_pad = self._prompt_pad[self._row_prompt][:, None, None]
        self._longest = int(self.prompt_lengths.max())

    def _to_slots(self, x: Tensor) -> Tensor:
        """`[N, K, R, E]` rows to `[P, K, slots * R, E]`: the rows of a prompt side by side."""
        x = x.view(*self._slots.shape, *x.shape[1:]) if self._regular else x[self._slots]
        prompts, slots, kv_heads, repeats, width = x.shape
        return x.transpose(1, 2).reshape(prompts, kv_heads, slots * repeats, width)

    def _from_slots(self, x: Tensor, rows: int, kv_heads: int) -> Tensor:
        """`[P, K, slots * R, E]` back to `[N, K, R, E]`."""
        prompts, _, _, width = x.shape
        slots = self._slots.shape[1]
        x = x.view(prompts, kv_heads, slots, -1, width).transpose(1, 2)
        x = x.reshape(prompts * slots, kv_heads, -1, width)
        return x if self._regular else x[self._flat_slot]

    def _apply_window(self, prompt_scores: Tensor, own_scores: Tensor, window: int) -> None:
        position = self.positions()[:, None, None, None]
        column = torch.arange(prompt_scores.shape[-1], device=self.device)
        prompt_scores.masked_fill_(position - column >= window, -torch.inf)
        own_column = torch.arange(own_scores.shape[-1], device=self.device)
        own_scores.masked_fill_(self.length - own_column >= window, -torch.inf)
