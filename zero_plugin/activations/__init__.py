"""Inputs of activation checkpoints, kept off the device between forward and backward."""
