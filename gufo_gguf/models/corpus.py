"""The text from which the generated models' tokenizer learns its merges.

Our own words, on what the tests talk about: prose, a few lines of Python, some JSON.  It is ASCII;
everything else is tokenized byte by byte, which the tests want as well (a character split over
several tokens).  Changing a letter here changes the tokenizer of every generated model.
"""

CORPUS = """
A language model reads a prompt before it writes the first word of an answer. Reading is called prefill, writing is
called decode. The longer the conversation, the more there is to read, and most of what is read was read before: every
request of a chat sends the whole conversation again, from the first message to the last one, and only the last one is
new. A cache keeps the state that the model computed, so that the next request pays for the new tokens only.

The state of a model has two parts. The rows of the attention layers grow with the conversation: one row for every
token, and a row that was written is never changed. The state of the recurrent layers does not grow. It is a summary of
everything that was read, it is updated in place, and it belongs to one position. You can cut rows at any place, but
you cannot wind a summary back. So the server takes a checkpoint where it will be needed: at the end of the system
message, at the end of the prompt, before the last user message, and where two conversations part.

What is a checkpoint? It is a frozen copy of the private state at one position, together with the rows before it. The
rows are kept in chunks that are shared between the checkpoints of the same conversation. When the memory is full the
server has to choose what to forget. It should keep what will be used again: the start that many conversations share,
the newest boundary of each conversation, and the point where an answer was edited. It must never return the wrong
state. Losing a chance is allowed, returning something that the model did not compute is not.

The user asked: how long does it take to restore a state from memory, and how long from disk? The assistant answered
that it depends on the number of tokens, on the size of a row, and on the speed of the disk. For a small model it is a
few milliseconds. For a large model with a long conversation it is about one second, and that is still much faster than
reading everything again. Then the user asked for an example, and the assistant wrote a function in Python:

def longest_common_prefix(first, second):
    length = 0
    for left, right in zip(first, second):
        if left != right:
            break
        length += 1
    return length

class Checkpoint:
    def __init__(self, tokens, private, chunks):
        self.tokens = tokens
        self.private = private
        self.chunks = chunks

    def matches(self, prompt):
        return prompt[:len(self.tokens)] == self.tokens

    def size_in_bytes(self):
        return len(self.private) + sum(len(chunk) for chunk in self.chunks)

import json
with open("config.json", "r") as file:
    config = json.load(file)
print(config["name"], config["value"], config["type"])

{"role": "system", "content": "You are a helpful assistant. You answer in short sentences."}
{"role": "user", "content": "What is the weather like in Paris today?"}
{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "get_weather",
"arguments": {"location": "Paris", "unit": "celsius", "date": "today"}}}]}
{"role": "tool", "content": "{\\"temperature\\": 21, \\"condition\\": \\"sunny\\"}"}
{"role": "assistant", "content": "It is sunny in Paris, with a temperature of 21 degrees. Is there anything else?"}
{"type": "object", "properties": {"location": {"type": "string", "description": "The name of the city"}, "unit":
{"type": "string", "enum": ["celsius", "fahrenheit"]}}, "required": ["location"]}

# Tools
You can call functions. The functions you can use are described below, one in each line. To call a function, write its
name and its arguments as an object. The result of the call will be sent to you in the next message. Do not make up
results. If you do not need a function, answer the question directly.

An agent works in a loop. It reads a file, it thinks about the next step, it calls a tool, it looks at the result, and
it starts again. After one hour there may be a hundred thousand tokens in the conversation. If the agent starts several
other agents for parts of the work, all of them begin with the same instructions, and after that each one goes its own
way. The first of them computes the shared part, and the others only have to restore it. When two of them send their
requests at the same time, one waits for the other.

Please write a short story about a river, a mountain and an old owl. Once there was an owl who lived in a tree near the
river. Every night she listened to the water and remembered what it said. In the morning the other animals came to ask
her about the day before, and she could tell them all of it, because she had kept it. But when they asked her about
things that had not happened, she was silent. Why do you not answer, said the fox. Because I only know what I have
heard, said the owl, and nothing that I have heard is like that.

The first number is one, the second is two, then three, four, five, six, seven, eight, nine and ten. Red, green, blue,
black and white are colours. Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday are the days of a week.
Hello! How are you? I am fine, thank you. Can you help me with this problem? Yes, of course. Let me think about it step
by step. First we look at what is given. Then we look for what is missing. Finally we check the answer.
"""
