"""Membership of runs that continue after losses: generations, commit of steps, state transfer."""
