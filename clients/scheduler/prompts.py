"""The prompts of the demo: beginnings that a small model of old English prose can carry on."""

DEMO_PROMPTS = (
    "In the beginning God created the heaven and the earth. And ",
    "And it came to pass in those days, that ",
    "The LORD is my shepherd; ",
    "Blessed are they that ",
    "It is a truth universally acknowledged, that ",
    "She was a young woman of ",
    "Once upon a time there was ",
    "The morning was fine, and they walked ",
)
