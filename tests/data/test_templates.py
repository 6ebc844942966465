"""Templates in the manner of the families: the tokens and where they stand are theirs, the code is not."""

import functools
from pathlib import Path

import pytest
from fixtures.tokenizers import BOS_CHAT_TEMPLATE, CHAT_TEMPLATE, CLOSE, OPEN, UNK, word_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ProcessorMixin

import trl.data.templates
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_prefix_preserving,
    is_chat_template_stop_token_trained,
    supports_tool_calling,
)
from trl.data.templates.source import mark_generation, remove_generation
from trl.errors import ConfigError

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" ~ (tool | tojson) }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if not loop.first or content %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# only thinks: the generation prompt opens the reasoning
QWEN3_THINKING = QWEN3.replace(
    "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable",
    "{{- '<|im_start|>assistant\\n<think>\\n' }}\n    {%- if enable",
)

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
    + message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LLAMA31 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is defined and tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- system_message }}{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- call.arguments | tojson }}
        {{- '}' }}
        {{- '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

GEMMA3 = """{{ bos_token }}
{%- if messages[0].role == 'system' -%}
    {%- set first = messages[0].content + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message.role == 'assistant' else message.role -%}
    {{ '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- else -%}
        {%- for item in message.content -%}{{ item.text | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model
' }}
{%- endif -%}
"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4_MINI = """{% for message in messages %}
{{ '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}
<|tool_call|>{{ call.function | tojson }}<|/tool_call|>
{%- endfor %}
<|end|>
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

DEEPSEEK_V3 = """{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_tool=false, first=true, system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.is_tool = false %}{{ '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['tool_calls'] %}
        {%- set ns.is_tool = false %}
        {%- for tool in message['tool_calls'] %}
            {%- if loop.first %}
                {{- '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' }}
            {%- else %}{{- '\\n' }}{% endif %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + tool['function']['name'] + '\\n' }}
            {{- (tool['function']['arguments'] | tojson) + '<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.is_tool %}
            {{- '<｜tool▁outputs▁end｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
            {%- set ns.is_tool = false %}
        {%- else %}
            {{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}
        {%- endif %}
    {%- endif %}
    {%- if message['role'] == 'tool' %}
        {%- if not ns.is_tool %}{{- '<｜tool▁outputs▁begin｜>' }}{% endif %}
        {%- set ns.is_tool = true %}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
{%- if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜>' }}{% endif %}"""

DEEPSEEK_R1 = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1] if '</think>' in message.content else message.content %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ message.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

COHERE = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}
{% if system_message != false %}
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system_message + '<|END_OF_TURN_TOKEN|>' }}{% endif %}
{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% set content = message['content'] %}
{% if message['role'] == 'user' %}
{{ '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' -}}
{% elif message['role'] == 'assistant' %}
{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"""

# tools and system message stand before the last user message, so that a further one moves them
MISTRAL_TOOLS = """{%- if messages[0].role == 'system' %}
    {%- set system_message, rest = messages[0].content, messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' ~ (tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('ids of 9') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content ~ '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

GLM4 = """[gMASK]<sop>
{%- if tools %}
<|system|>
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning = '' %}
{%- set content = m.content %}
{%- if m.reasoning_content is string %}
{%- set reasoning = m.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{%- if loop.index0 > ns.last_user and reasoning %}
{{ '\\n<think>' + reasoning.strip() + '</think>' }}
{%- else %}
{{ '\\n<think></think>' }}
{%- endif %}
{%- if content.strip() %}
{{ '\\n' + content.strip() }}
{%- endif %}
{%- for tc in m.tool_calls or [] %}
{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor %}
</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' -%}
<|observation|>
<tool_response>
{{ m.content }}
</tool_response>
{%- elif m.role == 'system' -%}
<|system|>
{{ m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}"""

HARMONY = """{%- macro shape(value, depth) -%}
    {%- if value is mapping -%}
        {%- for key in value -%}{{ key }}: {{ shape(value[key], depth + 1) }} {% endfor -%}
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro developer(tools) -%}
    {{- '# Tools\\n' }}{%- for tool in tools %}{{ shape(tool.function, 0) }}{%- endfor -%}
{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role == 'system' -%}
    {%- set developer_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}
    {{- '<|start|>developer<|message|>' + developer_message }}
    {%- if tools %}{{ developer(tools) }}{% endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if message.tool_calls %}
            {%- set future = namespace(final=false) %}
            {%- for later in loop_messages[loop.index:] %}
                {%- if later.role == 'assistant' and not later.tool_calls %}{% set future.final = true %}{% endif %}
            {%- endfor %}
            {%- if message.content and message.thinking %}{{- raise_exception('either or') }}{% endif %}
            {%- if (message.content or message.thinking) and not future.final %}
                {%- set analysis = message.content or message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + analysis + '<|end|>' }}
            {%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson }}{{- '<|call|>' }}
            {%- set last_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
            {%- set last_call.name = none %}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
            {%- set last_call.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_call.name is none %}{{- raise_exception('a result without a call') }}{% endif %}
        {{- '<|start|>functions.' + last_call.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson }}{{- '<|end|>' }}
    {%- elif message.role == 'user' -%}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""

# a vision model's: content is a list of blocks, and nothing else comes out
BLOCKS = """{% for message in messages %}{{ message['role'].capitalize() }}:{% for item in message['content'] %}
{% if item['type'] == 'text' %}{{ ' ' + item['text'] }}{% elif item['type'] == 'image' %}{{ '<image>' }}{% endif %}
{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

BY_INDEX = """{% for i in range(messages|length) %}<|im_start|>{{ messages[i].role }}
{{ messages[i]['content'] }}<|im_end|>
{% else %}nothing{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""

TWO_LOOPS = "{% if tools %}tools!" + CHATML + "{% else %}" + CHATML + "{% endif %}"

# no token ends a turn
ALPACA = """{% for message in messages %}
### {{ 'Response' if message.role == 'assistant' else 'Instruction' }}:
{{ message.content }}

{% endfor %}{% if add_generation_prompt %}### Response:
{% endif %}"""

TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
    *("<|user|>", "<|system|>", "<|assistant|>", "<|observation|>", "<|end|>", "<|tool_call|>", "<|/tool_call|>"),
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁end｜>"),
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<end_of_utterance>", "[INST]", "[/INST]"),
]

USER = {"role": "user", "content": "Is it?"}
YES = {"role": "assistant", "content": "Yes."}
AGAIN = {"role": "user", "content": "And now?"}
NO = {"role": "assistant", "content": "No."}
SYSTEM = {"role": "system", "content": "Answer."}
THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm", "thinking": "Hm"}
RESULT = {"role": "tool", "name": "look", "content": "blue", "tool_call_id": "abcdef123"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {}}}]

# template, whether it prints what the original prints everywhere, and the turns of `Yes.` and `No.`
FAMILIES = {
    "chatml": (CHATML, True, "{}<|im_end|>"),
    "qwen2.5": (QWEN25, True, "{}<|im_end|>"),
    "qwen3": (QWEN3, False, "<think>\n\n</think>\n\n{}<|im_end|>"),
    "qwen3 thinking": (QWEN3_THINKING, False, "\n</think>\n\n{}<|im_end|>"),
    "llama3": (LLAMA3, True, "{}<|eot_id|>"),
    "llama3.1": (LLAMA31, True, "{}<|eot_id|>"),
    "gemma": (GEMMA, True, "{}<end_of_turn>"),
    "gemma3": (GEMMA3, True, "{}<end_of_turn>"),
    "phi3": (PHI3, True, "{}<|end|>"),
    "phi4 mini": (PHI4_MINI, False, "{}<|end|>"),
    "deepseek v3": (DEEPSEEK_V3, True, "{}<｜end▁of▁sentence｜>"),
    "deepseek r1": (DEEPSEEK_R1, True, "{}<｜end▁of▁sentence｜>"),
    "cohere": (COHERE, True, "{}<|END_OF_TURN_TOKEN|>"),
    "mistral": (MISTRAL, True, " {}</s>"),
    "mistral with tools": (MISTRAL_TOOLS, True, " {}</s>"),
    "glm4": (GLM4, False, "\n<think></think>\n{}"),
    "harmony": (HARMONY, False, "<|channel|>final<|message|>{}<|return|>"),
    "alpaca": (ALPACA, True, "{}"),
    "by index": (BY_INDEX, True, "{}<|im_end|>"),
    "two loops": (TWO_LOOPS, True, "{}<|im_end|>"),
}
SAME_TEXT = [name for name, (_, same, _) in FAMILIES.items() if same]

BUNDLED = {
    "chatml.jinja": (CHATML, "{}<|im_end|>"),
    "llama3.jinja": (LLAMA3, "{}<|eot_id|>"),
    "gemma.jinja": (GEMMA, "{}<end_of_turn>"),
    "phi3.jinja": (PHI3, "{}<|end|>"),
    "cohere.jinja": (COHERE, "{}<|END_OF_TURN_TOKEN|>"),
    "mistral.jinja": (MISTRAL, " {}</s>"),
}


def byte_tokenizer(template):
    """A tokenizer of single bytes and the tokens of the families, so that every text can be encoded and read again."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def render(template, messages, **options):
    return byte_tokenizer(None).apply_chat_template(messages, chat_template=template, tokenize=False, **options)


def turns(template, messages, **options):
    """The texts of the runs of tokens that a template marks as the assistant's."""
    tokenizer = byte_tokenizer(template)
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)
    runs, before = [], 0
    for token, inside in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        if inside and not before:
            runs.append([])
        if inside:
            runs[-1].append(token)
        before = inside
    return [tokenizer.decode(run) for run in runs]


@functools.cache
def variant_of(template):
    return get_training_chat_template(byte_tokenizer(template))


def in_a_macro(template):
    """The same text from a template whose loop cannot be rewritten, because a macro prints it."""
    return "{% macro all() +%}" + template + "{%+ endmacro %}{{ all() }}"


def call(*arguments, content=""):
    calls = [
        {"type": "function", "id": "abcdef123", "function": {"name": "look", "arguments": {"at": argument}}}
        for argument in arguments
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


@pytest.mark.parametrize("name", FAMILIES)
def test_marks_are_around_what_the_model_writes(name):
    template, _, turn = FAMILIES[name]
    assert turns(variant_of(template), [USER, YES, AGAIN, NO]) == [turn.format("Yes."), turn.format("No.")]


@pytest.mark.parametrize("name", FAMILIES)
def test_one_turn_and_prompts_are_rendered_as_before(name):
    template, _, _ = FAMILIES[name]
    variant = variant_of(template)
    closing = "</s>" if name == "phi4 mini" else ""  # would stand before a tool's result
    assert render(variant, [USER, YES]) + closing == render(template, [USER, YES])
    assert render(variant, [USER], add_generation_prompt=True) == render(template, [USER], add_generation_prompt=True)


@pytest.mark.parametrize("name", SAME_TEXT)
@pytest.mark.parametrize(
    "content",
    ["", " ", "\n", " Yes \n", "Yes<|im_end|>\n", "assistant\n", "{{ x }}{% endgeneration %}", "é😀", "'\"\\\\"],
)
def test_text_is_rendered_as_before(name, content):
    template, _, _ = FAMILIES[name]
    messages = [{**USER, "content": content}, {**YES, "content": content}, AGAIN, THOUGHT]
    variant = variant_of(template)
    assert render(variant, messages) == render(template, messages)
    assert render(variant, messages[:3], add_generation_prompt=True) == render(
        template, messages[:3], add_generation_prompt=True
    )
    assert render(variant, messages, continue_final_message=True) == render(
        template, messages, continue_final_message=True
    )


@pytest.mark.parametrize(
    "name", ["chatml", "two loops", "qwen2.5", "llama3", "llama3.1", "gemma3", "phi3", "deepseek v3", "cohere"]
)
def test_system_message_and_tools_are_rendered_as_before(name):
    template, _, turn = FAMILIES[name]
    variant = variant_of(template)
    messages = [SYSTEM, USER, YES, AGAIN, NO]
    assert render(variant, messages, tools=TOOLS) == render(template, messages, tools=TOOLS)
    assert turns(variant, messages, tools=TOOLS) == [turn.format("Yes."), turn.format("No.")]


@pytest.mark.parametrize(
    ("template", "messages", "wanted"),
    [
        (
            QWEN25,
            [USER, call("a", "b"), RESULT, RESULT, YES],
            [
                '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>\n'
                '<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call><|im_end|>',
                "Yes.<|im_end|>",
            ],
        ),
        (
            QWEN3,
            [USER, call("a", content="Wait."), RESULT, YES],
            [
                "<think>\n\n</think>\n\nWait.\n"
                '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call><|im_end|>',
                "<think>\n\n</think>\n\nYes.<|im_end|>",
            ],
        ),
        (
            LLAMA31,
            [USER, call("a"), RESULT, YES],
            ['{"name": "look", "parameters": {"at": "a"}}<|eot_id|>', "Yes.<|eot_id|>"],
        ),
        (
            PHI4_MINI,
            [USER, call("a"), RESULT, YES],
            ['<|tool_call|>{"name": "look", "arguments": {"at": "a"}}<|/tool_call|><|end|>', "Yes.<|end|>"],
        ),
        (
            DEEPSEEK_V3,
            [USER, call("a"), RESULT, YES, AGAIN, NO],
            [
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n{"at": "a"}<｜tool▁call▁end｜>'
                "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
                "Yes.<｜end▁of▁sentence｜>",
                "No.<｜end▁of▁sentence｜>",
            ],
        ),
        (
            MISTRAL_TOOLS,
            [USER, call("a"), RESULT, YES],
            ['[TOOL_CALLS] [{"name": "look", "arguments": {"at": "a"}, "id": "abcdef123"}]</s>', " Yes.</s>"],
        ),
        (
            GLM4,
            [USER, call("a"), RESULT, YES],
            [
                "\n<think></think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
                "\n<think></think>\nYes.",
            ],
        ),
        (
            HARMONY,
            [USER, {**call("a"), "thinking": "Hm"}, RESULT, YES],
            [
                "<|channel|>analysis<|message|>Hm<|end|>"
                '<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"at": "a"}<|call|>',
                "<|channel|>final<|message|>Yes.<|return|>",
            ],
        ),
    ],
)
def test_tool_calls_are_marked_to_their_end(template, messages, wanted):
    assert turns(variant_of(template), messages, tools=TOOLS) == wanted


@pytest.mark.parametrize("template", [QWEN3, QWEN3_THINKING, GLM4, HARMONY])
def test_a_variant_keeps_the_reasoning_that_later_turns_made_disappear(template):
    messages = [USER, THOUGHT, AGAIN, NO, USER, THOUGHT]
    variant = variant_of(template)
    assert (render(template, messages).count("Hm"), render(variant, messages).count("Hm")) == (1, 2)
    # `Hm` stands in both marked turns, and the text of a conversation begins that of a longer one
    assert ["Hm" in turn for turn in turns(variant, messages)] == [True, False, True]
    for index in range(1, len(messages)):
        assert render(variant, messages).startswith(render(variant, messages[:index]))


def test_reasoning_is_kept_where_it_stands_in_the_text():
    messages = [USER, {**YES, "content": "<think>\nHm\n</think>\n\nYes."}, AGAIN, NO]
    assert turns(variant_of(QWEN3), messages)[0] == "<think>\nHm\n</think>\n\nYes.<|im_end|>"


def test_variables_of_the_template_still_work():
    variant = variant_of(QWEN3)
    options = {"enable_thinking": False, "add_generation_prompt": True}
    assert render(variant, [USER], **options).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "Reasoning: low<|end|>" in render(variant_of(HARMONY), [USER, YES], reasoning_effort="low")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_variant_preserves_prefixes(name):
    template, _, turn = FAMILIES[name]
    tokenizer = byte_tokenizer(variant_of(template))
    assert is_chat_template_prefix_preserving(tokenizer)
    assert is_chat_template_stop_token_trained(tokenizer) is turn.endswith(">")


def test_a_template_with_markers_is_returned_as_none_unless_later_messages_change_it():
    assert get_training_chat_template(byte_tokenizer(variant_of(CHATML))) is None
    assert get_training_chat_template(byte_tokenizer(variant_of(QWEN3))) is None
    # markers, but reasoning that disappears
    content = "{{- content.lstrip('\\n') }}"
    marked = QWEN3.replace(content, "{%- generation %}" + content + "{%- endgeneration %}")
    assert has_generation_markers(marked)
    assert turns(marked, [USER, THOUGHT]) == ["Yes."]
    assert turns(variant_of(marked), [USER, THOUGHT, AGAIN, NO]) == [
        "<think>\nHm\n</think>\n\nYes.<|im_end|>",
        "<think>\n\n</think>\n\nNo.<|im_end|>",
    ]


def test_the_tokenizer_is_not_changed_and_named_templates_are_told_apart():
    tokenizer = byte_tokenizer({"default": CHATML, "tool_use": QWEN25})
    assert get_training_chat_template(tokenizer) == variant_of(CHATML)
    assert tokenizer.chat_template == {"default": CHATML, "tool_use": QWEN25}
    tokenizer.chat_template = {"rag": CHATML, "tool_use": QWEN25}
    with pytest.raises(ConfigError, match="rag, tool_use, and none `default`"):
        get_training_chat_template(tokenizer)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, BOS_CHAT_TEMPLATE])
def test_token_ids_of_the_mask(template):
    tokenizer = word_tokenizer(chat_template=template)
    tokenizer.chat_template = get_training_chat_template(tokenizer)
    messages = [{**message, "content": f"w{20 + index}"} for index, message in enumerate([USER, YES, AGAIN, NO])]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids = [token for i in range(4) for token in (OPEN, UNK, 20 + i, CLOSE)]  # role names are unknown words
    assert [token for token in encoded["input_ids"] if token != tokenizer.bos_token_id] == ids
    assert encoded["assistant_masks"][-16:] == [0, 0, 0, 0, 0, 0, 1, 1] * 2


def test_content_may_be_blocks():
    variant = variant_of(BLOCKS)
    blocks = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in (USER, YES, AGAIN, NO)
    ]
    assert render(variant, blocks) == render(BLOCKS, blocks)
    assert turns(variant, blocks) == [" Yes.<end_of_utterance>", " No.<end_of_utterance>"]


class Processor(ProcessorMixin):
    attributes = ["tokenizer"]
    tokenizer_class = "PreTrainedTokenizerFast"


def test_a_processor_is_asked_for_its_template():
    processor = Processor(byte_tokenizer(None), chat_template=QWEN25)
    assert supports_tool_calling(processor)
    assert is_chat_template_prefix_preserving(processor)
    assert get_training_chat_template(processor) == variant_of(QWEN25)
    assert not is_chat_template_stop_token_trained(processor)


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_variants_serve_where_nothing_can_be_derived(name):
    template, turn = BUNDLED[name]
    variant = variant_of(in_a_macro(template))
    assert variant == (Path(trl.data.templates.__file__).parent / name).read_text(encoding="utf-8")
    assert render(variant, [USER, YES, AGAIN, NO]) == render(template, [USER, YES, AGAIN, NO])
    assert turns(variant, [USER, YES, AGAIN, NO]) == [turn.format("Yes."), turn.format("No.")]


NO_LOOP = """{{ messages[0].content }}{% if add_generation_prompt or messages[1] is defined %} Bot:{% endif %}
{% if messages[1] is defined %}{{ messages[1].content }}<|im_end|>{% endif %}"""
# the token that ends a turn is printed with the next message
NEXT_ENDS = """{% for m in messages %}{% if not loop.first %}<|im_end|>{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}{% endfor %}<|im_end|>{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (in_a_macro(QWEN25), "no `for` loop outside of macros"),
        (in_a_macro(CHATML.replace("im_start", "start")), "no `for` loop outside of macros"),
        (NO_LOOP, "no `for` loop"),
        (
            CHATML.replace("{%- endfor %}", "{% continue %}{%- endfor %}").replace("im_start", "x"),
            "which no `break` or `continue` leaves",
        ),
        (NEXT_ENDS, "not around the assistant's turns in the conversation 'one turn'"),
        (CHATML.replace("'<|im_start|>assistant\\n'", "'Bot:'"), "not start with what the generation prompt prints"),
        (CHATML.replace("add_generation_prompt", "false"), "prints nothing for `add_generation_prompt`"),
        ("{{ raise_exception('no') }}", "refuses a user message followed by one of the assistant"),
    ],
)
def test_other_templates_are_refused_with_the_reason_and_a_way_out(template, reason):
    with pytest.raises(ConfigError, match=reason) as info:
        variant_of(template)
    assert "{% generation %}" in str(info.value)
    with pytest.raises(ValueError, match="set `tokenizer"):
        variant_of(template)


@pytest.mark.parametrize(
    "function", [get_training_chat_template, supports_tool_calling, is_chat_template_prefix_preserving]
)
def test_no_template_is_an_error(function):
    with pytest.raises(ConfigError, match="has no chat template"):
        function(byte_tokenizer(None))


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% generation %}x{% endgeneration %}", True),
        ("{%- generation -%}x{%+ endgeneration +%}", True),
        ("{%generation%}x{%endgeneration%}", True),
        ("{% generation %}x", False),
        ("{# {% generation %}x{% endgeneration %} #}", False),
        ("{{ '{% generation %}{% endgeneration %}' }}", False),
        ("{% raw %}{% generation %}{% endgeneration %}{% endraw %}", False),
        ("{{ generation }}", False),
        (None, False),
    ],
)
def test_has_generation_markers(template, wanted):
    assert has_generation_markers(template) is wanted


@pytest.mark.parametrize(
    "template",
    ["a {%- generation -%} x {%- endgeneration -%} b", "a\n  {% generation %}\n x\n{% endgeneration +%}\n b"],
)
def test_markers_are_replaced_without_a_change_of_white_space(template):
    text = render(template, [USER])
    assert render(remove_generation(template), [USER]) == text
    marked = render(mark_generation(template, "<", ">"), [USER])
    assert marked.replace("<", "").replace(">", "") == text
    assert "x" in marked.split("<")[1].split(">")[0]


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (QWEN25, True),
        (QWEN3, True),
        (LLAMA31, True),
        (GLM4, True),
        (HARMONY, True),
        (DEEPSEEK_V3, True),
        (CHATML, False),  # the result comes out, the call does not
        (GEMMA, False),  # refuses the role
        (LLAMA31.replace("{{- call.arguments | tojson }}", "{{- '{}' }}"), False),  # no arguments
        (MISTRAL_TOOLS, False),  # wants ids, which a reply has not
        (PHI3, False),
    ],
)
def test_supports_tool_calling(template, wanted):
    assert supports_tool_calling(byte_tokenizer(template)) is wanted


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (CHATML, True),
        (QWEN25, True),
        (DEEPSEEK_V3, True),
        (GEMMA, True),  # takes no tool messages: asked about a user message
        (QWEN3, False),
        (GLM4, False),
        (HARMONY, False),
        (PHI4_MINI, False),  # an end of text behind the last message
        (CHATML.replace("message.content", "(message.content if loop.last else '')"), False),
        (CHAT_TEMPLATE.replace("<close>", "{{ message.reasoning_content if loop.last }} <close>"), False),
    ],
)
def test_prefix_preserving(template, wanted):
    assert is_chat_template_prefix_preserving(byte_tokenizer(template)) is wanted


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        ("{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}", True),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", False),  # no markers
        ("{% generation %}{% endgeneration %}{{ messages[0].content }}", False),  # nothing marked
    ],
)
def test_stop_token_trained(template, wanted):
    assert is_chat_template_stop_token_trained(byte_tokenizer(template)) is wanted
