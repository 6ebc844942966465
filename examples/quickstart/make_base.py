"""Makes `base/`, the model that the quickstart starts from. It is shipped: nobody has to run this.

The model learns one thing, from supervised examples: to answer `sort n x a z j` with the same letters in *some* order.
The order of every answer is drawn at random, so nothing here says what sorting is. About eight minutes on one core.

How it is trained may matter later. The one base tried at twice the learning rate permuted a little better, yet what
GRPO then taught it stopped short of eight letters, however well it did on the lengths in training.
"""

import argparse
import math
import os
import random
import string
import time
from itertools import count
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import task
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, UNK, END, USER, ASSISTANT = "<|pad|>", "<|unk|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|> ' + message['content'] + ' <|end|> ' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|> ' -}}{%- endif -%}"
)
LENGTHS = (3, 4, 5, 6, 7, 8)
IGNORED = -100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of 32 words: five markers, `sort`, and the alphabet."""
    words = [PAD, UNK, END, USER, ASSISTANT, "sort", *string.ascii_lowercase]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNK,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=64,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 0.33 M parameters with random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def encode_prompt(tokenizer: PreTrainedTokenizerFast, letters: list[str]) -> list[int]:
    """Token ids of the chat prompt `sort <letters>`, as the template gives them, without the template's cost."""
    return tokenizer.convert_tokens_to_ids([USER, "sort", *letters, END, ASSISTANT])


def draw_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(`input_ids`, `labels`), both [size, width]: prompts of 3-8 letters, answered by the letters reshuffled.

    The sets of letters that measure the quickstart are left out here too. Padded on the right, which a causal model
    does not see; labels count the answer and its end only.
    """
    rows = []
    for i in range(size):
        letters = task.draw(rng, LENGTHS[i % len(LENGTHS)], "train")
        prompt = encode_prompt(tokenizer, letters)
        answer = tokenizer.convert_tokens_to_ids([*rng.sample(letters, len(letters)), END])
        rows.append((prompt, answer))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.full((size, width), tokenizer.pad_token_id)
    labels = torch.full((size, width), IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        input_ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return input_ids, labels


def answer_loss(model: LlamaForCausalLM, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean negative log-likelihood of the answer tokens, in nats."""
    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    counted = targets != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[counted]), targets[counted])


def loss_floor() -> float:
    """The lowest `answer_loss` that a model of random permutations can have: log n! nats over n + 1 tokens."""
    return sum(math.lgamma(n + 1) for n in LENGTHS) / sum(n + 1 for n in LENGTHS)


@torch.inference_mode()
def share_of_permutations(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, length: int, prompts: int, do_sample: bool
) -> float:
    """Share of held-out prompts whose answer has exactly the letters of the prompt."""
    rng = random.Random(f"measure {length}")
    asked = [task.draw(rng, length, "test") for _ in range(prompts)]
    ids = torch.tensor([encode_prompt(tokenizer, letters) for letters in asked])
    settings = {"do_sample": do_sample, "max_new_tokens": 12} | ({"top_k": 0} if do_sample else {})
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, ids.shape[1] :]
    answers = tokenizer.batch_decode(written, skip_special_tokens=True)
    return sum(sorted(a.split()) == sorted(letters) for a, letters in zip(answers, asked)) / prompts


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
    """Train the model in place and print the loss above its floor as it falls."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, (args.steps - step) / (args.steps - 100))
    )
    start, recent = time.process_time(), 0.0
    for step in count(1):
        loss = answer_loss(model, *draw_batch(tokenizer, rng, args.batch_size))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent += loss.item() / args.report_every
        if step % args.report_every == 0:
            spent = time.process_time() - start
            print(f"step {step:5d}  loss above floor {recent - loss_floor():.4f} nats  {spent:5.0f} CPU s", flush=True)
            recent = 0.0
        if step == args.steps:
            return


def report(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: int = 1000) -> None:
    """Print how often answers are permutations, by length."""
    print("answers that are permutations of the letters asked for, held-out prompts:")
    for length in LENGTHS:
        greedy, sampled = (share_of_permutations(model, tokenizer, length, prompts, mode) for mode in (False, True))
        print(f"  length {length}: greedy {greedy:.3f}  sampled {sampled:.3f}", flush=True)


def main() -> None:
    """Make the tokenizer, train the model, measure it, save both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "base")
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--batch_size", type=int, default=126)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report_every", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    chat = [{"role": "user", "content": "sort b a"}]
    templated = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert templated == encode_prompt(tokenizer, ["b", "a"]), templated
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} words", flush=True)
    train(model, tokenizer, args)
    report(model.eval(), tokenizer)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
