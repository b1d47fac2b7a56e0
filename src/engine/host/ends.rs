//! The ends of a model: embedding, head, and the likeliest tokens.

use std::ops::Range;

use super::residual::{NormRows, Residual, norm_rows};
use super::{HostContext, HostStep, HostWorkspace, check_rows, each_row};
use crate::model::Position;
use crate::simd::linear::{Linear, Out, linear};
use crate::tensor::RowsMut;

impl HostContext<'_> {
    /// hidden = embedding of the step's tokens (+ learned positions).
    ///
    /// # Panics
    /// If `rows` are not rows of the step, or the step was prepared without tokens.
    pub fn embed(&self, ws: &mut HostWorkspace, step: &HostStep, rows: Range<usize>) {
        check_rows(step, &rows);
        let (m, k) = (self.model, self.host.kernels);
        let (spec, d) = (&m.spec, m.spec.d_model);
        let (tokens, positions) = (step.tokens(&rows), step.positions(&rows));
        let hidden = ws.hidden.view_mut(rows);
        // If the head has a packed copy of the table, read rows from the file, so that the table does not become
        // resident twice.
        let twice = spec.tied_head && Linear::wants_packing(m.embed.dtype, m.isa);
        each_row(self.pool, hidden, d, |r, out| {
            let token = tokens[r] as usize;
            if twice {
                let mut row = vec![0; m.embed.row_bytes()];
                m.embed.data.read_at(token * row.len(), &mut row);
                k.embed_row(m.embed.dtype, &row, spec.embed_scale, out);
            } else {
                k.embed_row(m.embed.dtype, m.embed.row(token), spec.embed_scale, out);
            }
            if let (Some(table), Position::Learned { offset }) = (&m.positions, &spec.position) {
                let mut position = vec![0f32; d];
                k.embed_row(table.dtype, table.row(positions[r] + offset), 1.0, &mut position);
                k.add(out, &position);
            }
        });
    }

    /// Logits of `rows` = head(norm(hidden + residual)), soft-capped; they go to row `to` of the logits and the
    /// following rows.
    pub fn head(&self, ws: &mut HostWorkspace, residual: Residual<'_>, rows: Range<usize>, to: usize) {
        let (m, n) = (self.model, rows.len());
        let (d, v) = (m.spec.d_model, m.spec.vocab);
        let norm = NormRows {
            hidden: ws.hidden.view_mut(rows.clone()),
            delta: ws.delta.view_mut(rows),
            out: RowsMut::new(ws.acts.reset(n, d), d),
        };
        norm_rows(self.pool, self.host.kernels, m.spec.norm, Some(&m.out_norm), residual, norm);
        let logits = ws.logits.rows_mut(to..to + n);
        linear(self.pool, self.host.mode, &mut ws.acts, &mut [Out { w: m.head(), out: logits, ldo: v }]);
        if let Some(cap) = m.spec.logit_softcap {
            self.host.kernels.softcap(logits, cap);
        }
    }

    /// The likeliest token of each of `rows` of the logits, the lowest index among equals, appended to `out`. `None`
    /// for a row whose logits are NaN or infinite, or all minus infinity: such a row has no likeliest token.
    pub fn pick(&self, ws: &HostWorkspace, rows: Range<usize>, out: &mut Vec<Option<u32>>) {
        let logits = ws.logits.view(rows.clone());
        out.extend((0..rows.len()).map(|r| {
            let (row, best) = (logits.row(r), self.host.kernels.argmax(logits.row(r)));
            // Processed in pieces, so that the inner loop has no exit and is vectorised.
            let beyond =
                |piece: &[f32]| piece.iter().fold(false, |any, &x| any | x.is_nan() | (x == f32::INFINITY));
            let sound = row[best] > f32::NEG_INFINITY && !row.chunks(1024).any(beyond);
            sound.then_some(best as u32)
        }));
    }
}
