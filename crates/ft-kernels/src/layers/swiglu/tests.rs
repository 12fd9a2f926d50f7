use super::*;
use crate::check::{close, gradient, randn};
use candle_core::DType;

const ALL: [Activation; 4] = [
    Activation::Silu,
    Activation::GeluTanh,
    Activation::Clamped { alpha: 1.702, limit: 0.8 },
    Activation::Sigmoid,
];

fn glu(activation: Activation, joint: Joint) -> Glu {
    Glu { activation, joint }
}

#[test]
fn gradients_match_finite_differences() -> Result<()> {
    let [g, u, dy] = [1, 2, 3].map(|seed| randn(seed, (4, 6), DType::F64));
    let (g, u, dy) = (g?, u?, dy?);
    for activation in ALL {
        let glu = glu(activation, Joint::Halves);
        let (dg, du) = backward_pair(glu, &g, &u, &dy)?;
        gradient("gate", &g, &dg, &dy, |g| forward(glu, g, Some(&u)));
        gradient("up", &u, &du, &dy, |u| forward(glu, &g, Some(u)));
    }
    Ok(())
}

/// A joint row gives the bits of two rows, and their gradients.
#[test]
fn joint_gate_and_up_have_the_bits_of_two_tensors() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let [g, u, dy] = [1, 2, 3].map(|seed| randn(seed, (37, 6), dtype));
        let (g, u, dy) = (g?, u?, dy?);
        for (activation, joint) in ALL.into_iter().flat_map(|a| [(a, Joint::Halves), (a, Joint::Interleaved)])
        {
            let glu = glu(activation, joint);
            let join = |a: &Tensor, b: &Tensor| match joint {
                Joint::Halves => Tensor::cat(&[a, b], 1),
                Joint::Interleaved => Tensor::cat(&[a.unsqueeze(2)?, b.unsqueeze(2)?], 2)?.reshape((37, 12)),
            };
            let both = join(&g, &u)?;
            close(&forward(glu, &both, None)?, &forward(glu, &g, Some(&u))?, 0.0);
            let (dg, du) = backward_pair(glu, &g, &u, &dy)?;
            let (d, none) = backward(glu, &both, None, &dy)?;
            assert!(none.is_none());
            close(&d, &join(&dg, &du)?, 0.0);
        }
    }
    Ok(())
}

#[test]
fn the_backward_pass_computes_the_output_again() -> Result<()> {
    let [g, u, dy] = [1, 2, 3].map(|seed| randn(seed, (9, 7), DType::F32));
    let (g, u, dy) = (g?, u?, dy?);
    let glu = Glu::default();
    let (c, d) = backward_pair(glu, &g, &u, &dy)?;
    let (a, b, h) = backward_again(glu, &g, Some(&u), dy, [0; 2])?;
    let b = b.expect("of two");
    for (x, y) in [(&a.values()?, &c), (&b.values()?, &d), (&h, &forward(glu, &g, Some(&u))?)] {
        close(x, y, 0.0);
    }
    Ok(())
}
