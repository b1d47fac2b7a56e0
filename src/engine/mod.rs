//! A loaded model and its forward pass.
