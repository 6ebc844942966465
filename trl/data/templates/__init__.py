"""Chat templates that are safe to train with. Import the modules; nothing is loaded here.

A template is known by what it does, not by its text: conversations of marker words are rendered, and one looks where
the words come out. So a template that differs from a published one in a comment or a date is handled like that one.

* `probing`: what a template does. Tool calls, turns that later messages change, the tokens it asks a model to write.
* `source`: the tags of a template's text. It finds the loops, and writes code into them.
* `derived`: a training variant made from the template's own source. The loop over the messages keeps its body; what
  the body prints for an assistant message is caught and printed again in three parts, header, turn and rest, with
  `{% generation %}` around the turn. Where the template rewrites earlier turns (it drops their reasoning), each
  assistant message is printed as it was when it was the last one.
* `training`: chooses the variant, and checks it against the original before anyone gets it.
* `clone`: a template, and the tokens it needs, from another tokenizer.

Derived: every template that prints its messages in a loop outside of macros and without `break` or `continue`; the
tests do it for templates in the manner of ChatML, Qwen 2.5, Qwen 3, Llama 3, Gemma, Phi-3, Phi-4-mini, DeepSeek V3 and
R1, Cohere, Mistral, GLM-4 and GPT-OSS. Bundled, for templates that print the same text in other ways: `chatml.jinja`,
`llama3.jinja`, `gemma.jinja`, `phi3.jinja`, `cohere.jinja` and `mistral.jinja`, without tools. Neither is used unless
it passes the check. A template for which both fail is refused, with the reason.

What a variant of a template that rewrites turns is: GPT-OSS ends every turn of the assistant with `<|return|>` or
`<|call|>`, as the model does, and no earlier one with `<|end|>`; Phi-4-mini leaves out the end of text behind the last
message; and rendering takes time with the square of the number of messages. GLM-4 has no token that ends a turn: its
marks end with the text, which `is_chat_template_stop_token_trained` tells.
"""
