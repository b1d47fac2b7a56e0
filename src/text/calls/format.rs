//! The ways in which chat templates have models write calls.

use super::control::Control;

/// The text that begins reasoning.
pub const THINK: &str = "<think>";
/// The text that ends reasoning.
pub const UNTHINK: &str = "</think>";

/// Texts with a meaning in answers. Some vocabularies have control tokens for them, which are no text otherwise.
pub const MARKERS: [&str; 7] =
    [THINK, UNTHINK, "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"];

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen).
    Hermes,
    /// The whole answer is `{"name": …, "parameters": …}`, perhaps behind `<|python_tag|>` (Llama 3).
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}, …]` (Mistral, to version 7 of its templates).
    Mistral,
    /// `[TOOL_CALLS]name[ARGS]{…}` for each call (Mistral, since version 11).
    MistralArgs,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder).
    Elements,
    /// A message to `functions.name` (gpt-oss; see [`Channels`](super::Channels)).
    Harmony,
}

impl CallFormat {
    /// What a template that shows functions asks for. `None` if it is a way of writing that is not known.
    pub fn of(template: &str) -> Option<CallFormat> {
        let has = |text: &str| template.contains(text);
        // Arguments as elements: of Qwen3-Coder, and of others (GLM).
        let is_coder = has("<function=") && has("<parameter=");
        let is_xml = has("<function=") || has("<arg_key>") || has("<invoke");
        match () {
            () if Control::is_in(template) => Some(CallFormat::Harmony),
            () if has("[TOOL_CALLS]") && has("[ARGS]") => Some(CallFormat::MistralArgs),
            () if has("[TOOL_CALLS]") => Some(CallFormat::Mistral),
            () if has("<tool_call>") && is_coder => Some(CallFormat::Elements),
            () if has("<tool_call>") && !is_xml => Some(CallFormat::Hermes),
            () if has("<|python_tag|>") => Some(CallFormat::Llama),
            () => None,
        }
    }

    /// The text in front of calls, if calls may follow other text.
    pub fn opening(self) -> Option<&'static str> {
        match self {
            CallFormat::Hermes | CallFormat::Elements => Some("<tool_call>"),
            CallFormat::Mistral | CallFormat::MistralArgs => Some("[TOOL_CALLS]"),
            CallFormat::Llama | CallFormat::Harmony => None,
        }
    }

    /// The name of the arguments in a call's object.
    pub fn arguments(self) -> &'static str {
        if self == CallFormat::Llama { "parameters" } else { "arguments" }
    }

    /// Whether an answer can have more than one call. Templates of Llama 3 refuse conversations with more, and harmony's
    /// `<|call|>` ends the answer.
    pub fn is_parallel(self) -> bool {
        !matches!(self, CallFormat::Llama | CallFormat::Harmony)
    }
}
