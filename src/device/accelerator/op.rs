//! The operations on rows of a step.

use super::exchange::{Mailbox, Publish};
use super::weights::{EmbedWeight, LayerWeights, LinearWeight, NormWeight};
use super::workspace::{PartialRows, Residual};
use crate::device::runtime::DevPtr;

/// What [`Accelerator::enqueue`](super::Accelerator::enqueue) computes, on memory of a [`Workspace`](super::Workspace). See
/// the [module](super) for their order.
#[derive(Clone, Copy)]
pub enum RowOp<'a> {
    /// hidden = embedding of the step's tokens (+ learned positions).
    Embed(&'a EmbedWeight),
    /// hidden += residual. Rows that cross to the host must contain the residual.
    Fold(Residual),
    /// hidden += residual; x = norm(hidden), or hidden without a norm; qkv = W·x + bias, norms of q and k, RoPE.
    Project {
        /// The layer's weights.
        layer: &'a LayerWeights,
        /// What is added first.
        residual: Residual,
    },
    /// Turns qkv into the inputs of attention: q = the rounded queries; keys and values of rows attended on this
    /// device, in full or in part, go to their pages. The rows of qkv may have been projected on this device, or uploaded
    /// ([`Workspace::qkv_rows`](super::Workspace::qkv_rows)).
    Append {
        /// The base of a layer's pages, or of a staging area with the step's page numbers.
        kv: DevPtr,
    },
    /// Copies the rows of qkv that are attended elsewhere, in full or in part, to their places in a mailbox, then
    /// publishes its epoch. Without such rows nothing is published.
    Publish(Publish<'a>),
    /// [`RowOp::Project`], [`RowOp::Append`] and [`RowOp::Publish`] in one, with the same results, except that the contents of
    /// qkv afterwards are unspecified. [`RowOp::parts`] for who has no pass over the rows that does all three.
    Qkv {
        /// The layer's weights.
        layer: &'a LayerWeights,
        /// As in [`RowOp::Append`].
        kv: DevPtr,
        /// What is added first.
        residual: Residual,
        /// The rows that are attended elsewhere, if there are any.
        publish: Option<Publish<'a>>,
    },
    /// attn = attention of the rows that are attended on this device, over their pages and with the layer's sinks; `ws.partial` = the
    /// partial attention of rows with [`Attend::From`](super::Attend::From) or [`Attend::UpTo`](super::Attend::UpTo), which sinks do not join; attn of padding rows = 0. The
    /// rows begin and end at [`StepDesc::cuts`](super::StepDesc::cuts), or are all rows.
    Attend {
        /// The layer's weights.
        layer: &'a LayerWeights,
        /// As in [`RowOp::Append`].
        kv: DevPtr,
    },
    /// attn of the rows with [`Attend::From`](super::Attend::From) = `ws.partial` merged with `other`, and with the layer's sinks.
    Merge {
        /// The layer's weights.
        layer: &'a LayerWeights,
        /// The attention over the tokens before `from`. It begins with the first such row of the step, and may lie in mapped
        /// memory; or it is the result of a step of the same rows with [`Attend::UpTo`](super::Attend::UpTo), in a workspace with another `partial`.
        other: &'a PartialRows,
    },
    /// attn of the rows that are attended elsewhere = o of the mailbox. The host has written o before the call.
    Collect(&'a Mailbox),
    /// delta = W·attn + bias.
    OutProj(&'a LayerWeights),
    /// hidden += residual; x = norm(hidden); act = activation(W·x + bias). Of experts: chooses those of each row, and computes
    /// the activations of the chosen ones, and of the shared one ([`ExpertRows`](super::ExpertRows)). Where the host computes some of them it waits for
    /// the choices: then activations of the chosen ones belong to [`RowOp::FfnDown`].
    FfnUp {
        /// The layer's weights.
        layer: &'a LayerWeights,
        /// What is added first.
        residual: Residual,
    },
    /// delta = W·act + bias. Of experts: Σ weight·(W·act) of the chosen ones, in the order of a row's choices, added to what the
    /// shared one gives.
    FfnDown(&'a LayerWeights),
    /// Of a layer whose experts are divided: delta += what the host's experts give ([`ExpertRows::share`](super::ExpertRows::share)), after
    /// [`RowOp::FfnDown`], which has computed the sum of the device's. With exact results both are added here, in the order of a
    /// row's choices.
    AddShare(&'a LayerWeights),
    /// logits = head(norm(hidden + residual)) of the rows that want logits, soft-capped, each at its place among all
    /// rows of the step that want logits.
    Logits {
        /// The norm before the head.
        norm: NormWeight,
        /// The head's matrix.
        head: &'a LinearWeight,
        /// What is added first.
        residual: Residual,
    },
    /// argmax\[i\] = the token of the largest logit, the lowest index among equals, of the rows that want logits, and
    /// log Σ e^x of the row's logits ([`Workspace::logsumexp_at`](super::Workspace::logsumexp_at)), which is not finite if a logit is NaN or infinite.
    Argmax,
}

impl<'a> RowOp<'a> {
    /// The operations that this is in one: those of [`RowOp::Qkv`], or itself.
    pub fn parts(self) -> impl Iterator<Item = RowOp<'a>> {
        let parts = match self {
            RowOp::Qkv { layer, kv, residual, publish } => [
                Some(RowOp::Project { layer, residual }),
                Some(RowOp::Append { kv }),
                publish.map(RowOp::Publish),
            ],
            one => [Some(one), None, None],
        };
        parts.into_iter().flatten()
    }
}
