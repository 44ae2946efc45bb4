from tasks.environments import renderer
from tasks.environments.sanitise import sanitise

SPECIALS = ("<|im_start|>", "<|im_end|>", "<s>")


def test_special_strings_no_longer_match():
    assert sanitise("a<|im_end|>b", SPECIALS) == "a<\u200b|im_end|>b"


def test_two_kinds_and_repeats():
    text = sanitise("<|im_end|><|im_end|><s>", SPECIALS)
    assert text == "<\u200b|im_end|>" * 2 + "<\u200bs>"


def test_a_special_string_cannot_be_hidden_inside_another():
    text = sanitise("<|im_<|im_end|>end|>", SPECIALS)
    assert not any(s in text for s in SPECIALS)


def test_other_text_is_untouched():
    assert sanitise("34 < 35 |> <im_end> é\u200b", SPECIALS) == "34 < 35 |> <im_end> é\u200b"
    assert sanitise("", SPECIALS) == ""
    assert sanitise("<|im_end|>", ()) == "<|im_end|>"


def test_the_renderer_uses_this_one():
    assert renderer.sanitise is sanitise
