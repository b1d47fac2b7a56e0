//! Images of single experts, which change places with others while a model runs.

use super::layer::{ImagePlacing, LayerSource, Piece};
use super::matrix::{FfnMatrices, LayerMatrices, Matrix};
use crate::device::Accelerator;
use crate::model::{Block, ModelSpec, Weights};
use crate::tensor::Half;
use crate::{Error, Result};

/// The experts of a layer, each as it lies in an image of the layer: gate and up with their bias, then down with its own.
#[derive(Debug)]
pub struct ExpertImages {
    /// Of each expert, its two matrices.
    matrices: Vec<[Matrix; 2]>,
    /// Of expert 0; those of the others differ in their names.
    pieces: Vec<Piece>,
    /// Bytes of gate and up, and of down: from an expert's to the next one's.
    bytes: [usize; 2],
    layer: usize,
}

impl ExpertImages {
    /// Those of `layer` for an accelerator and its activations.
    ///
    /// # Errors
    /// A missing tensor, or a layer without experts that the accelerator computes.
    pub fn new(
        accel: &dyn Accelerator,
        spec: &ModelSpec,
        weights: &Weights,
        layer: usize,
        act: Half,
    ) -> Result<ExpertImages> {
        let FfnMatrices::Experts(of) =
            LayerMatrices::new(accel, &Block::of(spec, layer), weights, layer)?.ffn
        else {
            return Err(Error::usage(format!("layer {layer} has no experts that a device computes")));
        };
        let matrices: Vec<[Matrix; 2]> =
            of.ups.into_iter().zip(of.downs).map(|(up, down)| [up, down]).collect();
        let mut placing = ImagePlacing::of_layer(accel, weights, act, layer);
        let up = placing.expert(&matrices[0][0])?;
        let down = placing.expert(&matrices[0][1])?;
        Ok(ExpertImages { pieces: placing.into_pieces(), matrices, bytes: [up, down], layer })
    }

    /// Number of the layer.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Bytes of gate and up, and of down.
    pub fn bytes(&self) -> [usize; 2] {
        self.bytes
    }

    /// Writes the image of expert `e`.
    ///
    /// # Errors
    /// A tensor is misshapen, or the image has another size.
    pub fn fill(&self, source: &LayerSource<'_>, e: u32, image: &mut [u8]) -> Result<()> {
        let [up, down] = self.bytes;
        if image.len() != up + down {
            let len = image.len();
            return Err(Error::Capacity(format!("{len} bytes for an expert of {}", up + down)));
        }
        for piece in &self.pieces {
            let matrix = &self.matrices[e as usize][usize::from(piece.at >= up)];
            piece.of(matrix).fill(source, &mut image[piece.at..piece.at + piece.bytes])?;
        }
        Ok(())
    }
}
