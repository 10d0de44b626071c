"""The paper's figures, made from simulated iterations: a module each, drawn in one style."""
