//! The control tokens of harmony.

/// A control token that parts the messages of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// A message begins, with the role of its author.
    Start,
    /// A message ends, and another follows.
    End,
    /// The header is over.
    Message,
    /// The channel follows.
    Channel,
    /// The type of the content follows.
    Constrain,
    /// The answer is over.
    Return,
    /// The answer is over with a call.
    Call,
}

impl Control {
    /// All of them, with their texts. Without the first five a vocabulary cannot write harmony.
    pub const ALL: [(Control, &'static str); 7] = [
        (Control::Start, "<|start|>"),
        (Control::End, "<|end|>"),
        (Control::Message, "<|message|>"),
        (Control::Channel, "<|channel|>"),
        (Control::Constrain, "<|constrain|>"),
        (Control::Return, "<|return|>"),
        (Control::Call, "<|call|>"),
    ];
    /// How many of them, from the first on, are needed.
    pub const NEEDED: usize = 5;

    /// Whether a template writes harmony.
    pub fn is_in(template: &str) -> bool {
        ["<|start|>", "<|channel|>", "<|message|>"].iter().all(|text| template.contains(text))
    }
}
